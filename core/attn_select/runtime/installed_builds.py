"""Imports the build of a kernel that a plan names, after comparing its version; compares signatures before a call.

A kernel library changes its functions between releases. What a plugin passes is compared with the installed function
once, when a layer's group is made, so that a user reads which function differs instead of a ``TypeError`` (or wrong
numbers) in the middle of a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from attn_select.backends.kernel_builds import KernelBuild
from attn_select.backends.reasons import install_command
from attn_select.errors import KernelMismatchError
from attn_select.machine.environment import WRONG_VERSION, Environment
from attn_select.machine.library_imports import import_library


class InstalledBuild:
    """One build of a kernel as it is installed here.

    Args:
        build: what the plan chose.

    Attributes:
        build: the same.
        module: ``build.module``, imported.

    Raises:
        KernelMismatchError: the distribution has a version that the build's library excludes, or the module cannot be
            imported. It is an ``ImportError`` as well.
    """

    def __init__(self, build: KernelBuild) -> None:
        self.build = build
        environment, library = Environment(), build.library
        version = environment.version(library.distribution)
        if version is not None and environment.state(library) == WRONG_VERSION:
            text = f"{build.label}: {library.distribution} {version} is installed, {library.version} is needed"
            raise KernelMismatchError(text, hint=install_command(library, environment))
        self.module = self.imported(build.module)

    def imported(self, module: str) -> ModuleType:
        """Import a module of the distribution; raise KernelMismatchError where that fails."""
        try:
            return import_library(module)
        except (ImportError, OSError, RuntimeError) as error:  # a shared library that does not fit raises all of these
            text = f"{self.build.label}: {module} cannot be imported ({type(error).__name__}: {error})"
            raise KernelMismatchError(text, hint=f"install it: {self.build.library.install}") from error

    def function(
        self,
        name: str,
        positional: Sequence[str] = (),
        keywords: Sequence[str] = (),
        *,
        module: ModuleType | None = None,
    ) -> Callable[..., Any]:
        """Return a function of the distribution after comparing its signature with what will be passed to it.

        Args:
            name: of the function.
            positional: the parameters that are passed by position, in order.
            keywords: the parameters that are passed by name, or may be.
            module: where the function is; ``build.module`` by default.

        Raises:
            KernelMismatchError: it does not exist, or ``check`` refuses it.
        """
        place = module or self.module
        function: Callable[..., Any] | None = getattr(place, name, None)
        if function is None:
            raise self.mismatch(f"{place.__name__}.{name} does not exist")
        self.check(function, f"{place.__name__}.{name}", positional, keywords)
        return function

    def check(
        self, function: Callable[..., Any], name: str, positional: Sequence[str] = (), keywords: Sequence[str] = ()
    ) -> None:
        """Compare a function's signature with what will be passed to it; ``name`` is what an error calls it.

        Raises:
            KernelMismatchError: its first parameters are not ``positional``, it takes no argument of a name in
                ``keywords``, or it requires an argument that is in neither.
        """
        parameters = inspect.signature(function).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        passed = {*positional, *keywords}
        wrong: list[str] = []
        if inspect.Parameter.VAR_POSITIONAL not in kinds and [*parameters][: len(positional)] != [*positional]:
            wrong.append(f"its first parameters are not {', '.join(positional)}")
        lacks = [keyword for keyword in keywords if keyword not in parameters]
        if lacks and inspect.Parameter.VAR_KEYWORD not in kinds:
            wrong.append(f"it takes no argument {', '.join(lacks)}")
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        required = [p.name for p in parameters.values() if p.default is p.empty and p.kind not in variadic]
        if unknown := [parameter for parameter in required if parameter not in passed]:
            wrong.append(f"it requires {', '.join(unknown)}, which this plugin does not pass")
        if wrong:
            raise self.mismatch(f"{name} has another signature: {'; '.join(wrong)}. It takes ({', '.join(parameters)})")

    def mismatch(self, what: str) -> KernelMismatchError:
        """Return the error that says what is wrong with this build, to be raised."""
        library = self.build.library
        return KernelMismatchError(
            f"{self.build.label}: {what}",
            hint=f"this plugin is written for {library.distribution}{library.version}: install such a version, "
            "or choose another distribution with the backend's option `provider`",
        )
