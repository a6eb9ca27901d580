"""`divdec playground`: a web page that shows the effect of steering on each token."""
