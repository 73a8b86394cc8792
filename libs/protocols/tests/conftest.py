from hypothesis import settings

# How long one example takes says how busy the machine is, no more.
settings.register_profile("protocols", deadline=None)
settings.load_profile("protocols")
