"""A policy on several devices: the processes that torchrun started, each with a share of the weights."""
