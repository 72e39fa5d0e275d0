"""A standing trial of the library: what users do that nobody expects of them."""
