"""Small models from scratch on a fictitious world of authors."""
