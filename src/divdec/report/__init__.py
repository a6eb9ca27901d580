"""Results for people: plots, and pages of one HTML file that need no network."""
