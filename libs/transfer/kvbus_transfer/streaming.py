"""A copy that writes past the caches, compiled when it is first needed, where llvmlite is there (extra `index`).

Blocks are larger than caches and are not read again by the core that copies them. memcpy first reads what it overwrites and
throws out of the cache what others need there; stores past the cache do neither, which made a 2 MiB copy a quarter faster.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from kvbus_transfer.copying import Pieces, copy_pieces

# void copy(i64* pieces, i64 count): pieces are (to, from, length). The middle of each goes in lines of 64 bytes, aligned at the
# target; what is before and after goes through memcpy.
_SOURCE = """
target triple = "{triple}"
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define void @copy(ptr %pieces, i64 %count) {{
entry:
  br label %next
next:
  %at = phi i64 [0, %entry], [%at1, %tail]
  %more = icmp ult i64 %at, %count
  br i1 %more, label %piece, label %end
piece:
  %first = mul i64 %at, 3
  %to_p = getelementptr i64, ptr %pieces, i64 %first
  %from_p = getelementptr i64, ptr %to_p, i64 1
  %length_p = getelementptr i64, ptr %to_p, i64 2
  %to = load i64, ptr %to_p
  %from = load i64, ptr %from_p
  %length = load i64, ptr %length_p
  %negative = sub i64 0, %to
  %odd = and i64 %negative, 63
  %short = icmp ult i64 %length, %odd
  %head = select i1 %short, i64 %length, i64 %odd
  %to_ptr = inttoptr i64 %to to ptr
  %from_ptr = inttoptr i64 %from to ptr
  call void @llvm.memcpy.p0.p0.i64(ptr %to_ptr, ptr %from_ptr, i64 %head, i1 false)
  %rest = sub i64 %length, %head
  %body = and i64 %rest, -256
  %to_a = getelementptr i8, ptr %to_ptr, i64 %head
  %from_a = getelementptr i8, ptr %from_ptr, i64 %head
  %none = icmp eq i64 %body, 0
  br i1 %none, label %tail, label %lines
lines:
  %i = phi i64 [0, %piece], [%i1, %lines]
  %s0 = getelementptr i8, ptr %from_a, i64 %i
  %s1 = getelementptr i8, ptr %s0, i64 64
  %s2 = getelementptr i8, ptr %s0, i64 128
  %s3 = getelementptr i8, ptr %s0, i64 192
  %d0 = getelementptr i8, ptr %to_a, i64 %i
  %d1 = getelementptr i8, ptr %d0, i64 64
  %d2 = getelementptr i8, ptr %d0, i64 128
  %d3 = getelementptr i8, ptr %d0, i64 192
  %v0 = load <16 x i32>, ptr %s0, align 1
  %v1 = load <16 x i32>, ptr %s1, align 1
  %v2 = load <16 x i32>, ptr %s2, align 1
  %v3 = load <16 x i32>, ptr %s3, align 1
  store <16 x i32> %v0, ptr %d0, align 64, !nontemporal !0
  store <16 x i32> %v1, ptr %d1, align 64, !nontemporal !0
  store <16 x i32> %v2, ptr %d2, align 64, !nontemporal !0
  store <16 x i32> %v3, ptr %d3, align 64, !nontemporal !0
  %i1 = add i64 %i, 256
  %again = icmp ult i64 %i1, %body
  br i1 %again, label %lines, label %tail
tail:
  %left = sub i64 %rest, %body
  %to_t = getelementptr i8, ptr %to_a, i64 %body
  %from_t = getelementptr i8, ptr %from_a, i64 %body
  call void @llvm.memcpy.p0.p0.i64(ptr %to_t, ptr %from_t, i64 %left, i1 false)
  %at1 = add i64 %at, 1
  br label %next
end:
  fence seq_cst
  ret void
}}
!0 = !{{i32 1}}
"""


def fastest_copy() -> Callable[[Pieces], None]:
    """The streaming copy, or plain memcpy where it cannot be compiled. It takes 0.2 s the first time."""
    try:
        return _compiled()
    except Exception:  # no llvmlite, another LLVM, a processor without vectors: all the same here
        return copy_pieces


def _compiled() -> Callable[[Pieces], None]:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(_SOURCE.format(triple=llvm.get_process_triple()))
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine: Any = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    native = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(engine.get_function_address("copy"))

    def copy(pieces: Sequence[tuple[int, int, int]], _keep: Any = engine) -> None:
        flat = array("q", [number for piece in pieces for number in piece])
        address, _ = flat.buffer_info()
        native(address, len(pieces))

    return copy
