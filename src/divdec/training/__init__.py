"""Training on `transformers.Trainer`: auxiliaries, distillation, gradient depth."""
