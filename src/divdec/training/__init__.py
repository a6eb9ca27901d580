"""Fine-tuning the auxiliaries, on `transformers.Trainer`: resume, precision and launchers are its own."""
