"""Commands that count the products of solvers and samplers: `digits`, `glyphs`."""
