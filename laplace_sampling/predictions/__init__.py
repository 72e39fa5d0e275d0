"""What `predict` returns, how wide its error bars should be, and how good the samples behind it are.

- `Prediction` and one kind a family of likelihoods; `make_prediction` has the table of kinds.
- `FunctionCovariance`: covariances that are known without samples; `DenseCovariance` by a factor of `H`.
- `Calibration`: factors of covariance, temperature and noise, from held-out data or left-out training data, and what
  these say about them.
- `LeaveOneOut`: each training datum predicted from the others.
- `Diagnosis`: a table of checks of a fit.
"""
