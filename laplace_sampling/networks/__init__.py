"""Networks as functions of one flat weight vector, and products of their Jacobians.

- `Linearisation`: outputs, `jvp`, `vjp`, `ggn` and `jacobian` of a trained network; its file lists the policies behind.
- `LastLayer`, `Subnetwork`: those of a network of which only a layer, or single elements of tensors, are random.
- `linearise`: one of the three, by what `parameters=` says.
- `FilterNetwork`: a network in coordinates in which correlated taps of filters are independent.
- `check_consistency`: whether a network is a function of each datum, with one derivative.
"""

from laplace_sampling.networks.consistency import check_consistency as check_consistency
from laplace_sampling.networks.filters import FilterNetwork as FilterNetwork
from laplace_sampling.networks.last_layer import LastLayer as LastLayer
from laplace_sampling.networks.linearisation import Linearisation as Linearisation
from laplace_sampling.networks.random_weights import Subnetwork as Subnetwork
from laplace_sampling.networks.random_weights import linearise as linearise
