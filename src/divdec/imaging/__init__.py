"""Images as tokens: a class, then a raster of codes. What steers, trains and decodes text does the rest."""
