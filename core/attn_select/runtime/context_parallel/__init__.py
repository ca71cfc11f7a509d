"""Context parallelism: the cache of each request lies on all ranks of a group, a share of its tokens on each."""
