"""Dense language models in, one Mixture-of-Experts out: the library behind Upcycle's flows."""
