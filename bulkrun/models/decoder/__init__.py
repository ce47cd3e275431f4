"""The one decoder of all fast families: its layers, in torch, compiled for a CPU, or the same bits in any batch."""
