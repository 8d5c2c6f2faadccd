"""Where prompts come from, and how finished groups become batches."""
