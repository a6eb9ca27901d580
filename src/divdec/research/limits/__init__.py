"""What unlearning by steering does not do, measured on the demo's world: attacks by prompts and by fine-tuning."""
