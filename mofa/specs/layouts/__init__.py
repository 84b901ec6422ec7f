"""Pipeline layouts: which layers, predictions and ends of a model each virtual chunk holds, and the texts that say it.

A text is Megatron's string (``Et*3|(tt|)*29m|L``), options that split layers unevenly, or torchtitan's lists of module
names; :func:`mofa.specs.layouts.read.read_layout` tells them apart.
"""
