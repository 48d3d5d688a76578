"""READS: where a model lies, its configuration, its tokenizer. Knows files, not torch."""
