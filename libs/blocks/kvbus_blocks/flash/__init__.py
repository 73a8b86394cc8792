"""The fast prefix index: `load` once per process, then make as many `FlashIndex` of it as there are models.

`layout` says where everything lies, `kernels` is the compiled part, `index` the class around it.
"""
