//! What this crate declares of NCCL's C ABI, against NCCL's own headers as a C++ compiler reads
//! them: the layout and the initial value of every struct, every constant, the prototype of every
//! function; and against the library, that no function is missing.
//!
//! What only device code sees (`ncclCoopAny`, `ncclLsaBarrierSession_C`) a host compiler is not
//! shown.

mod constants;
mod functions;
mod structs;

use std::path::{Path, PathBuf};
use std::process::Command;

use devcomm_locate::{NcclPart, find_nccl};

use crate::sys::nccl::DEV_COMM_VERSION;

/// NCCL's headers name a few types of CUDA's, whose headers are seldom there. None of them is in a
/// struct by value but an enum.
const CUDA_STANDIN: &str = "#pragma once
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

/// Prints why the test cannot run, past the test harness, for the count of skipped tests.
fn skip(reason: &str) {
    use std::io::Write as _;
    let reason = reason.replace('\n', " ");
    let _ = writeln!(std::io::stdout(), "SKIPPED {}: {reason}", module_path!());
}

/// The folder of NCCL's headers; `None`, said why, where they are not there.
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

/// Runs the C++ compiler on `program`, which follows NCCL's headers. `None` where there are no
/// headers or is no compiler.
fn compile(folder: &Path, program: &str, arguments: &[&str]) -> Option<()> {
    let include = include()?;
    for header in ["cuda.h", "cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"] {
        let text = if header == "cuda.h" { CUDA_STANDIN } else { "#include \"cuda.h\"\n" };
        std::fs::write(folder.join(header), text).unwrap();
    }
    let source = folder.join("abi.cc");
    std::fs::write(&source, HEADERS.to_owned() + program).unwrap();
    let mut compiler = Command::new("c++");
    // The headers declare one function for Linux only, and go by this name.
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

/// What `program`, the body of a main function, prints.
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
