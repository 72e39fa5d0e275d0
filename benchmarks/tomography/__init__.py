"""Error bars of tomographic images: the linearised deep image prior beside others, on drawn and on real data."""
