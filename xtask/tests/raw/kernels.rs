//! Tests that a kernel for each function of the list links, with NCCL's code inlined.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use cuda_builder::{Artifacts, CalleeKind, CudaBuilder, Error};
use libtest_mimic::Failed;
use xtask::raw::{Files, Function, Nccl, parse};

use crate::{ensure, root};

/// The prelude of the kernels' files.
const PRELUDE: &str = "
use core::ffi::c_void;
use core::mem::MaybeUninit;
use cuda_std::prelude::*;
use devcomm_types::{F8E4M3, F8E5M2};
use half::{bf16, f16};
use nccl_device::raw::*;

/// The GIN back end that runs everywhere; others make NCCL's code longer.
const PROXY: u32 = 1 << 2;

/// Returns false, which LLVM finds out only after linking.
#[inline(never)]
fn never() -> bool {
    false
}

/// Returns the next argument.
unsafe fn next<T: Copy>(arguments: &mut *const u64) -> T {
    unsafe {
        let argument = arguments.cast::<T>().read_volatile();
        *arguments = arguments.add(4);
        argument
    }
}
";

/// How a kernel creates state that only NCCL can create: the type, the call, and its prerequisites.
/// State created in the kernel has known coops, whose functions can be inlined.
const NCCL_STATE: [(&str, &str, &[&str]); 5] = [
    ("CoopAny", "ncclCoopAnyInitCta(made)", &[]),
    ("Gin", "ncclGin_C_init(made, PROXY, next(a), next(a))", &[]),
    (
        "LsaBarrierSession",
        "ncclLsaBarrierSessionInit(made, coop_any, next(a), next(a), next(a), next(a), false, \
        next(a))",
        &["CoopAny"],
    ),
    (
        "GinBarrierSession",
        "ncclGinBarrierSessionInit(made, coop_any, gin, next(a), next(a), next(a))",
        &["CoopAny", "Gin"],
    ),
    (
        "BarrierSession",
        "ncclBarrierSessionInit(made, coop_any, next(a), next(a), gin, next(a), next(a), next(a), \
        false, next(a))",
        &["CoopAny", "Gin"],
    ),
];

/// NCCL's GIN barriers call internal functions several times. LLVM does not inline those, so the
/// coop is unknown in them. (`nccl_device` has GIN barriers in Rust.)
const NOT_INLINED: [&str; 2] = ["ncclGinBarrierSessionSync", "ncclBarrierSessionSync"];

/// Returns the variable's name for a type, such as `coop_any` for `CoopAny`.
fn variable(ty: &str) -> String {
    let mut name = String::new();
    for c in ty.chars() {
        if c.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(c.to_ascii_lowercase());
    }
    name
}

/// Writes the statements that create the state of this type and its prerequisites.
fn make(ty: &str, made: &mut Vec<String>, text: &mut String) {
    let Some((_, call, after)) = NCCL_STATE.iter().find(|(known, ..)| *known == ty) else { return };
    if made.iter().any(|known| known == ty) {
        return;
    }
    for other in *after {
        make(other, made, text);
    }
    made.push(ty.to_owned());
    let name = variable(ty);
    // NCCL's initialisers write to uninitialised memory.
    *text += &format!(
        "    let mut {name} = MaybeUninit::<{ty}>::uninit();\n    let {name} = \
        {name}.as_mut_ptr();\n    {};\n",
        call.replace("made", &name)
    );
}

/// Returns whether the call is linked and checked, and then removed: NCCL's reduce and copy
/// functions have the same code for each element type, so only those of two types are inlined.
fn is_removed(function: &Function) -> bool {
    let reduce_or_copy = ["ReduceSum", "Copy"].iter().any(|name| function.name.contains(name));
    let ty = function.name.rsplit_once('_').map_or("", |(_, ty)| ty);
    reduce_or_copy && !["F32", "F8E4M3"].contains(&ty)
}

/// Returns a kernel that calls the function with arguments from memory.
fn kernel(function: &Function) -> String {
    let name = &function.name;
    let mut body = String::new();
    let mut made = Vec::new();
    let mut arguments = Vec::new();
    for param in &function.params {
        let pointee = param.ty.strip_prefix("*mut ").or_else(|| param.ty.strip_prefix("*const "));
        match pointee.filter(|ty| NCCL_STATE.iter().any(|(known, ..)| known == ty)) {
            Some(ty) => {
                make(ty, &mut made, &mut body);
                arguments.push(variable(ty));
            }
            None => arguments.push(format!("next::<{}>(a)", param.ty)),
        }
    }
    let call = format!("{name}({})", arguments.join(", "));
    let call = match &function.returns {
        Some(ty) => format!("out.cast::<{ty}>().write_volatile({call})"),
        None => call,
    };
    if is_removed(function) {
        body = format!("    if !never() {{ return }}\n{body}");
    }
    format!(
        "#[kernel]\npub unsafe fn call_{name}(arguments: *const u64, out: *mut u64) {{\n\
         \x20   let (mut arguments, _out) = (arguments, out);\n    let a = &mut arguments;\n\
         \x20   unsafe {{\n{body}    {call};\n    }}\n}}\n"
    )
}

/// The kernels' files, compiled in parallel.
const FILES: [&str; 5] = ["core", "gin_post", "gin_wait", "reduce", "copy"];

/// Returns the file of a function. Functions of GIN are large, and those of reduce and copy are
/// many.
fn file_of(function: &Function) -> &'static str {
    let name = function.name.as_str();
    match () {
        () if name.contains("GinPut") || name.contains("GinSignal") => "gin_post",
        () if name.contains("Gin") || name.starts_with("ncclBarrier") => "gin_wait",
        () if name.contains("ReduceSum_") || name.contains("LsaCopy") => "reduce",
        () if name.contains("Copy_") => "copy",
        () => "core",
    }
}

fn write_if_changed(path: &Path, text: &str) {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return;
    }
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// Builds a package with a kernel for each of the functions.
fn build(package: &str, functions: &[Function]) -> Result<Result<Artifacts, Error>, Failed> {
    let tests = Path::new(env!("CARGO_TARGET_TMPDIR")).join("raw_functions");
    let folder = tests.join(package);
    let root = root().canonicalize()?;
    let mut manifest = format!(
        "[package]\nname = {package:?}\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[dependencies]\n\
         half = {{ version = \"2.4\", default-features = false }}\n"
    );
    for (name, package, path) in [
        ("cuda_std", "devcomm-cuda-std", "crates/cuda_std"),
        ("devcomm-types", "devcomm-types", "crates/types"),
        ("nccl_device", "devcomm-nccl-device", "crates/nccl_device"),
    ] {
        let path = root.join(path);
        writeln!(manifest, "{name} = {{ package = {package:?}, path = {path:?} }}")?;
    }
    manifest += "\n[workspace]\n";
    write_if_changed(&folder.join("Cargo.toml"), &manifest);
    // The package has the workspace's locked versions.
    write_if_changed(&folder.join("Cargo.lock"), &fs::read_to_string(root.join("Cargo.lock"))?);
    // The kernels are named after NCCL's functions.
    let mut lib = "#![no_std]\n#![allow(unused, non_snake_case)]\n".to_owned();
    for file in FILES {
        let kernels = functions.iter().filter(|function| file_of(function) == file).map(kernel);
        let text = PRELUDE.to_owned() + &kernels.collect::<String>();
        write_if_changed(&folder.join("src").join(file).with_extension("rs"), &text);
        writeln!(lib, "pub mod {file};")?;
    }
    write_if_changed(&folder.join("src/lib.rs"), &lib);
    // cuda_builder's tests share the folder, so that common dependencies are compiled once.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("target");
    let builder =
        CudaBuilder::new(package).manifest_dir(&folder).target_dir(target).assemble(false);
    Ok(builder.out_dir(folder.join("out")).build())
}

/// Checks that a kernel for each function links, with NCCL's code inlined. Linking refuses a
/// declaration with other types than NCCL's, so those of the linked kernels are the right ones.
pub fn every_function_inlines(_nccl: &Nccl) -> Result<(), Failed> {
    let functions = parse(&Files::checked_in(&root())?.list)?;
    let (others, inlined): (Vec<Function>, Vec<Function>) =
        functions.into_iter().partition(|function| NOT_INLINED.contains(&function.name.as_str()));
    let reports = build("raw-inlined", &inlined)??.report()?;
    ensure(reports.len() == inlined.len(), || format!("{} kernels", reports.len()))?;
    for report in &reports {
        ensure(report.call_prototypes == 0, || format!("{}.rs calls indirectly", report.file))?;
        // NCCL asserts against unsupported operations: sums of two types by multicast.
        let asserts = report.callees.iter().all(|callee| callee.kind() == CalleeKind::Assertion);
        ensure(asserts, || format!("{} calls {:?}", report.name, report.callees))?;
    }
    // The others link too, but the build refuses their indirect calls.
    match build("raw-apart", &others)? {
        Ok(_) => Err("NCCL's GIN barriers are inlined now: remove them from NOT_INLINED".into()),
        Err(error) => {
            ensure(error.to_string().contains("indirect calls are left"), || error.to_string())
        }
    }
}
