"""From sources to what models read: documents, tokenizer, corpora, tasks."""
