"""Matrix products with weights: plain, of 8 and of 4 bits, and with the same bits in any batch."""
