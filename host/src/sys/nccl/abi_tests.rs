//! Compares this crate's declarations of NCCL's C ABI with NCCL's headers, with a C++ compiler: the
//! layout and initial value of every struct, every constant, the prototype of every function. Also
//! checks that the library has no function that is not declared.
//!
//! Device-only types (`ncclCoopAny`, `ncclLsaBarrierSession_C`) are not visible to a host compiler.

mod constants;
mod functions;
mod structs;

use std::path::{Path, PathBuf};
use std::process::Command;

use devcomm_locate::{NcclPart, find_nccl};

use crate::sys::nccl::DEV_COMM_VERSION;

/// Declarations in place of CUDA's headers, which are rarely installed. NCCL's structs contain
/// none of these types by value except an enum.
const CUDA_STUB: &str = "#pragma once
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef enum { CU_MEM_LOCATION_TYPE_DEVICE = 1 } CUmemLocationType;
";

const HEADERS: &str = "#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <nccl.h>
#include <nccl_device.h>
";

/// Prints why the test cannot run, uncaptured by the test harness; the line is counted as a skip.
fn skip(reason: &str) {
    use std::io::Write as _;
    let reason = reason.replace('\n', " ");
    let _ = writeln!(std::io::stdout(), "SKIPPED {}: {reason}", module_path!());
}

/// Returns the folder of NCCL's headers. If there is none, prints why and returns `None`.
fn include() -> Option<PathBuf> {
    let tree = find_nccl(None, NcclPart::Headers, |tree| match tree.version {
        Some(version) if version == DEV_COMM_VERSION => Ok(()),
        other => Err(format!("its headers are of version {other:?}, wanted {DEV_COMM_VERSION}")),
    });
    match tree {
        Ok(tree) => tree.include,
        Err(error) => {
            skip(&error.to_string());
            None
        }
    }
}

/// Compiles NCCL's headers followed by `program`. `None` if the headers or a compiler are missing.
fn compile(folder: &Path, program: &str, arguments: &[&str]) -> Option<()> {
    let include = include()?;
    for header in ["cuda.h", "cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"] {
        let text = if header == "cuda.h" { CUDA_STUB } else { "#include \"cuda.h\"\n" };
        std::fs::write(folder.join(header), text).unwrap();
    }
    let source = folder.join("abi.cc");
    std::fs::write(&source, HEADERS.to_owned() + program).unwrap();
    let mut compiler = Command::new("c++");
    // With this macro the headers declare a function that exists on Linux only.
    compiler.args(["-std=c++17", "-DNCCL_OS_LINUX", "-Wno-deprecated-declarations"]);
    compiler.arg("-I").arg(folder).arg("-I").arg(include).arg(&source).args(arguments);
    match compiler.status() {
        Err(error) => {
            skip(&format!(
                "there is no C++ compiler to read NCCL's headers ({error}); install one that \
                 answers to `c++`, such as g++"
            ));
            None
        }
        Ok(status) => {
            assert!(status.success(), "c++: {status}");
            Some(())
        }
    }
}

/// Returns the output of `program`, a C++ program without its includes.
fn printed(program: &str) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let binary = folder.path().join("abi");
    compile(folder.path(), program, &["-o", binary.to_str().unwrap()])?;
    let output = Command::new(binary).output().unwrap();
    assert!(output.status.success(), "{}", output.status);
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Compares line by line, so that a failure names the line.
fn compare(ours: &str, theirs: &str) {
    for (ours, theirs) in ours.lines().zip(theirs.lines()) {
        assert_eq!(ours, theirs);
    }
    assert_eq!(ours.lines().count(), theirs.lines().count());
}
