"""The demo: SmolLM2 forgets capitals that it knows from its pretraining."""
