"""Context parallel: each rank of a group runs its share of a forest's tokens."""
