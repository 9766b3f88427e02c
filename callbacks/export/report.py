"""Why a model cannot be exported: where in its code, and what to write instead."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from pathlib import Path

import lightning
import torch
from torch import nn

# What is in an error of `torch.export` or of the ONNX exporter :: what to write instead.
_PROGRAMS = """
is reached past the module :: A lambda, a hook or a wrapped or compiled method holds the model \
itself, or another part of it. Write a method, call `module.compile()` where one is compiled, and \
export the part that has all of it.
the state dict lacks :: A program is filled with what checkpoints have: let `state_dict` return \
all of the weights, or export parts of the model (`modules=[...]`).
there is no example input :: Set `example_input_array` in the module, or give `example_input`.
does not call|has no attribute ` :: Give names of `named_modules` that `forward` calls with the \
example input.
ModuleNotFoundError.*onnx :: ONNX needs more packages: `pip install lightning-zero3[onnx]`.
object has no attribute|is not defined :: `forward` itself fails: call the model with its example \
input.
data-dependent expression|_local_scalar_dense|DataDependent :: A branch, a loop or a size depends \
on values in a tensor. Write `torch.where(condition, a, b)`, `torch.cond(...)` or a mask, and move \
assertions to the steps.
SymFloat|SymInt|SymBool :: A number that is read out of a tensor (`.item()`, `float(...)`) is not \
known while the model is traced. Keep it a tensor; print and format it in the steps.
numpy\\(\\) is not supported|__array__ :: NumPy is not traced. Write it with torch.
[Cc]annot access data pointer :: Code that needs memory itself (an extension, a deep copy, NumPy) \
is not traced. Make it a `torch.library.custom_op`, or write it with torch.
not a known type|Unsupported (?:input|output) type|unhashable :: `forward` takes and returns \
tensors, numbers, strings, None, and lists, tuples and dicts of them. Return one of these, or \
register the class (`torch.export.register_dataclass`).
[Cc]onstraints violated|specialized :: A dimension that `dynamic_shapes` calls dynamic has one \
size in the code, or in an example of one sample. Write sizes as `x.shape[0]` or -1, give two \
samples, or call the dimension static.
dynamic_shapes :: `dynamic_shapes` must have the structure of the inputs: \
`{"x": {0: "batch"}}`, by the names of the arguments of `forward`.
missing a required argument|too many positional|unexpected keyword|multiple values :: Give \
`example_input` as `forward` takes it: a tensor, a tuple of arguments, or a dict by name.
not attached to a `Trainer` :: `forward` runs without a trainer where it is served. Use \
`self.trainer` in the steps, or keep what it says in an attribute.
is not implemented|UnsupportedOperator|No (?:decomposition|ONNX function)|\\.default$ :: This \
operator cannot be traced, or the format lacks it. Write it with others.
reduction dim|shapes cannot be|size of tensor|must match :: The example input does not fit the \
model. Give the shapes that `forward` takes.
"""
# The same of the compiler of TorchScript, with the rule of the language that is broken.
_SCRIPTS = """
variable number of arguments :: No `*args` or `**kwargs`: name each argument.
undefined Tensor :: An argument without annotation is a Tensor: annotate one that may be None, \
`y: Optional[Tensor] = None`.
but instead found type 'Optional|from type Optional|NoneType :: An Optional must be refined before \
its use: `if y is not None:`, or `assert y is not None`.
Could not match type|Empty lists default to|inferred\\) but instead|List\\[Tensor\\] :: A list or \
dict has one type of element, and an empty one is `List[Tensor]`: annotate it, \
`sizes: List[int] = []`.
Lambda :: No lambda: write a function at the top of the file, or a method.
function definitions :: No function inside a function: write it at the top of the file.
[Cc]omprehension :: Comprehensions have one `for`, and no `if`: write a loop.
try blocks|[Rr]aise :: No `try`: check what may go wrong before, by `if`.
Yield|[Gg]enerator :: No generators: collect values in a list.
import statements|global variables :: No `import` or `global` inside of `forward`: import at the \
top of the file; make a global value an attribute of the module, or `Final`.
closed over global :: A global value is not seen: make it an attribute of the module.
failed to convert Python type: 'list'|inferred type|List inputs|List trace :: A list in an \
attribute needs elements of one type: annotate it in the class, `sizes: List[int]`; a list of \
modules is an `nn.ModuleList`.
failed to convert Python type|Only tensors and :: An attribute must be a tensor, a number, a \
string, or a list, tuple or dict of these: keep such parts of a configuration as attributes.
failed to compile it :: A function in an attribute is compiled, too: write a method, or \
`@torch.jit.unused` where serving does not need it.
integer literal for index :: A `ModuleList` is indexed by literals: write \
`for k, block in enumerate(self.blocks)`, or give the modules an interface \
(`torch.jit.interface`).
nonexistent attribute :: An attribute must exist, with its type, since `__init__`.
is not defined in the :: A variable must be defined on all ways to its use: give it a value before \
the `if`.
return statement returned :: All ways through a function return one type: annotate it, and return \
that.
Don't support formatting|JoinedStr|formatting :: f-strings have no format: write \
`"{}".format(x)`, or print in the steps.
Set aren't|Match aren't|NamedExpr|With aren't|Delete|Starred|aren't supported|are not supported \
:: Not in the language: write it with `if`, loops, lists, tuples and dicts.
builtin|numpy|has no attribute or method|is not a Tensor :: Only torch's operations, methods of \
modules and a few of Python's functions are known: write it with torch, or mark the method \
`@torch.jit.unused` or `@torch.jit.ignore`.
__init__ function|Class :: A class of your own must be annotated and simple \
(`@torch.jit.script`), or a `NamedTuple`.
"""
_OWN = [str(Path(__file__).parents[2] / name) for name in ("callbacks", "strategies")]
_FOREIGN = (*(f"{path}{os.sep}" for path in (*torch.__path__, *lightning.__path__, *_OWN)), "<")
_STANDARD = sysconfig.get_path("stdlib")


def explain(error: Exception, module: nn.Module, is_script: bool) -> str:
    """Say what cannot be exported and where, and in a second line what to write instead.

    Args:
        error: of the export.
        module: that is exported.
        is_script: TorchScript was to be made.
    """
    message = str(error) or type(error).__name__
    found = re.search(r'File "(.+)", line (\d+)', message) if is_script else None
    file, line = (found[1], int(found[2])) if found else _place(error, module)
    owner, part = next(
        ((n, m) for n, m in module.named_modules() if _has_code(m, file, line)), ("", module)
    )
    rules = [rule.split(" :: ") for rule in (_SCRIPTS if is_script else _PROGRAMS).splitlines()]
    advice = next(
        (text for pattern, text in rules[1:] if re.search(pattern, f"{type(error)}{message}")),
        "Export parts of the model (`modules=[...]`), or what torch says above may help.",
    )
    code = linecache.getline(file, line).strip()
    return (
        f"{message.strip().splitlines()[0][:200].rstrip(':')}, in {owner or 'the module itself'}"
        f" ({type(part).__name__}), {file}:{line}: `{code}`\n{advice}"
    )


def _place(error: Exception, module: nn.Module) -> tuple[str, int]:
    """Return file and line of the model's code that raised, or of its ``forward``."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_standard = frame.filename.startswith(_STANDARD) and "site-packages" not in frame.filename
        if not is_standard and not frame.filename.startswith(_FOREIGN):
            return frame.filename, frame.lineno or 0
    code = type(module).forward.__code__
    return code.co_filename, code.co_firstlineno


def _has_code(module: nn.Module, file: str, line: int) -> bool:
    for cls in type(module).__mro__:
        for function in vars(cls).values():
            code = getattr(function, "__code__", None)
            if code and code.co_filename == file and line >= code.co_firstlineno:
                if line <= max(number or 0 for *_, number in code.co_lines()):
                    return True
    return False
