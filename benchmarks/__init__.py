"""Commands that measure the library beside others: a project of its own, whose README says how to run them."""
