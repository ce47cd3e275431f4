"""Compiled twins of the ops for tensors on a CPU: C++ sources, and thin functions that hand them the tensors' memory.

A twin has its reference's signature and takes what it cannot do to the reference. `library` compiles and loads.
"""
