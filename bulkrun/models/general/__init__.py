"""Any other decoder of transformers over our paged cache, compared with its own attention when it is loaded."""
