"""serve.adapters: fine-tuned adapters, loaded and served beside each other."""
