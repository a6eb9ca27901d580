"""The demo: small models that learn a fictitious world, some of which they are then made to forget."""
