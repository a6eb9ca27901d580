"""Fine-tuning: the auxiliaries that steer, on `transformers.Trainer`, so that resume, precision and launchers are its."""
