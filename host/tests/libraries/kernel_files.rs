//! Tests of loading kernels, from the program's PTX and from files.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use devcomm_host::{
    Context, Error, KernelSet, Kernels, LaunchConfig, LaunchError, LaunchRefusal, RawArg, Result,
};

use devcomm_types::{DevComm, Kernel};
use sha2::{Digest, Sha256};

use crate::support::{FakeDevComm, Fill, SIDECAR, Unknown, log_of, packed, set, set_of, tests};

tests! {
    kernels_of_a_file_are_launched_under_the_type_of_its_name,
    a_kernel_of_a_file_is_launched_by_its_name_with_arguments_of_its_sizes,
    a_file_that_cannot_be_loaded_says_why,
    nothing_stays_loaded_of_files_one_of_which_cannot_be_loaded in ["STUB_UNLOADS" = "1"],
    ptx_is_loaded_with_its_source_lines,
    a_cubin_for_the_gpu_is_loaded_instead_of_the_ptx,
    ptx_is_compiled_where_the_cubin_is_for_another_gpu_or_not_wanted
        in ["DEVCOMM_JIT" = "0"] ["DEVCOMM_JIT" = "1"],
    a_cubin_that_is_damaged_or_refused_is_replaced_by_the_ptx_with_a_warning,
    a_launch_that_would_hang_or_has_no_kernel_is_refused_before_the_driver_sees_it,
}

/// Returns PTX without a cubin.
fn ptx(text: &str) -> KernelSet {
    set("fill", text, SIDECAR, None)
}

/// Returns PTX with a cubin, whose description has this hash, or the right one if it is `None`.
fn cubin(cubin: &str, arch: &str, hash: Option<&str>) -> KernelSet {
    let of = |bytes: &[u8]| Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
    let hash = hash.map_or_else(|| of(cubin.as_bytes()), str::to_owned);
    let field = format!(r#"{{"cubin_sha256":"{hash}","arch":"{arch}""#);
    let sidecar = SIDECAR.replace(r#"{"arch":"sm_90""#, &field);
    set("fill", ".version 8.6\n.loc 1 2 3", &sidecar, Some(cubin.as_bytes()))
}

fn load_file(context: &Context, file: &Path) -> Result<Kernels> {
    // SAFETY: the stub driver runs no kernel.
    unsafe { Kernels::load_files(context, &[file]) }
}

fn kernels_of_a_file_are_launched_under_the_type_of_its_name() {
    let (folder, context) = (tempfile::tempdir().unwrap(), Context::new(0).unwrap());
    fs::write(folder.path().join("fill.json"), SIDECAR).unwrap();
    let kernels = load_file(&context, &folder.path().join("fill.cubin")).unwrap();
    assert_eq!(kernels.info::<Fill>().unwrap().registers, 32);
    let (stream, dev) = (context.stream().unwrap(), FakeDevComm::new(2, &[]));
    // SAFETY: the stub driver runs no kernel.
    unsafe { Fill::with_args((&dev, 7_usize)).grid(2).block(64).launch(&kernels.on(&stream)) }
        .unwrap();
    stream.synchronize().unwrap();
    assert_eq!(log_of(0), ["cuModuleLoad fill.cubin", "cuLaunchKernelEx fill grid 2 block 64"]);
}

fn a_kernel_of_a_file_is_launched_by_its_name_with_arguments_of_its_sizes() {
    let (folder, context) = (tempfile::tempdir().unwrap(), Context::new(0).unwrap());
    fs::write(folder.path().join("fill.json"), SIDECAR).unwrap();
    let kernels = load_file(&context, &folder.path().join("fill.cubin")).unwrap();
    let params = kernels.params("fill").unwrap();
    let params: Vec<_> = params.iter().map(|p| (&*p.name, &*p.type_name, p.size)).collect();
    assert_eq!(params, [("comm", "DevComm", 248), ("count", "usize", 8)]);
    assert!(kernels.params("unknown").is_none());

    let (stream, dev) = (context.stream().unwrap(), FakeDevComm::new(2, &[]));
    let launch = |name: &str, grid: u32, args: &[RawArg<'_>]| {
        // SAFETY: the stub driver runs no kernel.
        unsafe { kernels.on(&stream).launch_by_name(name, LaunchConfig::new(grid, 64), args) }
    };
    let comm = || RawArg::new::<DevComm, _>(&dev);
    launch("fill", 2, &[comm(), RawArg::new(7_usize)]).unwrap();
    launch("fill", 1, &[comm(), RawArg::of_bytes(&[0; 8])]).unwrap();
    let log = ["cuLaunchKernelEx fill grid 2 block 64", "cuLaunchKernelEx fill grid 1 block 64"];
    assert_eq!(log_of(0)[1..], log);

    for args in [vec![comm()], vec![comm(), RawArg::new(7_u32)], vec![]] {
        assert!(matches!(refusal(launch("fill", 1, &args)), LaunchRefusal::Parameters { .. }));
    }
    let beyond = launch("fill", 3, &[comm(), RawArg::new(7_usize)]);
    assert!(matches!(refusal(beyond), LaunchRefusal::TooFewBarriers { .. }));
    let error = launch("unknown", 1, &[]).unwrap_err();
    assert!(matches!(error, Error::Launch(LaunchError::KernelNotFound { .. })), "{error}");
    assert_eq!(log_of(0).len(), 3);
}

fn ptx_is_loaded_with_its_source_lines() {
    let context = Context::new(0).unwrap();
    let _kernels = Kernels::load(&context, &ptx(".version 8.6\n.loc 1 2 3")).unwrap();
    assert_eq!(log_of(0), ["cuModuleLoadDataEx with lines"]);
}

fn a_cubin_for_the_gpu_is_loaded_instead_of_the_ptx() {
    let context = Context::new(0).unwrap();
    for arch in ["sm_90", "sm_90a"] {
        Kernels::load(&context, &cubin("\x7fELF\0", arch, None)).unwrap();
    }
    assert_eq!(log_of(0), ["cuModuleLoadDataEx ELF"; 2]);
}

fn ptx_is_compiled_where_the_cubin_is_for_another_gpu_or_not_wanted() {
    let context = Context::new(0).unwrap();
    Kernels::load(&context, &cubin("\x7fELF\0", "sm_80", None)).unwrap();
    Kernels::load(&context, &cubin("\x7fELF\0", "sm_90", None)).unwrap();
    let last = match std::env::var("DEVCOMM_JIT").as_deref() {
        Ok("1") => "cuModuleLoadDataEx with lines",
        _ => "cuModuleLoadDataEx ELF",
    };
    assert_eq!(log_of(0), ["cuModuleLoadDataEx with lines", last]);
}

fn a_cubin_that_is_damaged_or_refused_is_replaced_by_the_ptx_with_a_warning() {
    let (warnings, context) = (tempfile::NamedTempFile::new().unwrap(), Context::new(0).unwrap());
    let output = Arc::new(File::create(warnings.path()).unwrap());
    tracing_subscriber::fmt().with_ansi(false).with_writer(output).init();
    let damaged = set_of(("fill", packed(".version 8.6\n.loc 1 2 3"), SIDECAR, Some(&[1, 2])));
    let other = cubin("\x7fELF\0", "sm_90", Some("00ff"));
    let refused = cubin("\x7fELF refused\0", "sm_90", None);
    for set in [damaged, other, refused] {
        Kernels::load(&context, &set).unwrap();
    }
    let compiled = "cuModuleLoadDataEx with lines";
    assert_eq!(log_of(0), [compiled, compiled, "cuModuleLoadDataEx ELF refused", compiled]);
    let text = fs::read_to_string(warnings.path()).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.len() == 3 && lines.iter().all(|line| line.contains("WARN")), "{text}");
    assert!(lines.iter().all(|line| line.contains("kernel module fill")), "{text}");
    assert!(lines[1].contains("hash of the cubin"), "{text}");
    assert!(lines[2].contains("something is wrong"), "{text}");
}

fn nothing_stays_loaded_of_files_one_of_which_cannot_be_loaded() {
    let (folder, context) = (tempfile::tempdir().unwrap(), Context::new(0).unwrap());
    fs::write(folder.path().join("fill.json"), SIDECAR).unwrap();
    let files = ["fill.cubin", "missing.cubin"].map(|name| folder.path().join(name));
    // SAFETY: the stub driver runs no kernel.
    let refused = unsafe { Kernels::load_files(&context, &files) }.unwrap_err();
    assert!(refused.to_string().contains("missing.json"), "{refused}");
    assert_eq!(log_of(0), ["cuModuleLoad fill.cubin", "cuModuleUnload"]);
}

fn a_file_that_cannot_be_loaded_says_why() {
    let (folder, context) = (tempfile::tempdir().unwrap(), Context::new(0).unwrap());
    let load = |name: &str| load_file(&context, &folder.path().join(name)).unwrap_err();
    let error = load("fill.cubin");
    assert!(matches!(error, Error::Launch(LaunchError::BadSidecar { .. })), "{error}");
    assert!(error.to_string().contains("fill.json"), "{error}");
    fs::write(folder.path().join("broken.json"), SIDECAR).unwrap();
    let error = load("broken.cubin").to_string();
    assert!(error.contains("cuModuleLoad") && error.contains("broken.cubin"), "{error}");
    fs::write(folder.path().join("old.json"), SIDECAR.replace("2.32.3", "2.30.7")).unwrap();
    assert!(matches!(load("old.cubin"), Error::Launch(LaunchError::WrongNcclStamp { .. })));
}

fn refusal(result: Result<()>) -> LaunchRefusal {
    match result {
        Err(Error::Launch(LaunchError::Refused { kernel: "fill", refusal })) => refusal,
        other => panic!("{other:?}"),
    }
}

fn a_launch_that_would_hang_or_has_no_kernel_is_refused_before_the_driver_sees_it() {
    let context = Context::new(0).unwrap();
    let kernels = Kernels::load(&context, &ptx(".version 8.6")).unwrap();
    let stream = context.stream().unwrap();
    let launch = |barriers, grid| {
        let dev = FakeDevComm::new(barriers, &[]);
        let fill = Fill::with_args((&dev, 7_usize)).grid(grid).block(64);
        // SAFETY: the stub driver runs no kernel.
        refusal(unsafe { fill.launch(&kernels.on(&stream)) })
    };
    // The stub driver has 132 multiprocessors with two blocks each.
    assert!(matches!(launch(1000, 265), LaunchRefusal::NotResident { .. }));
    assert!(matches!(launch(4, 5), LaunchRefusal::TooFewBarriers { .. }));
    assert_eq!(kernels.resident_blocks::<Fill>(256, 0).unwrap(), 264);
    match kernels.info::<Unknown>() {
        Err(Error::Launch(LaunchError::KernelNotFound { name, available })) => {
            assert_eq!((name.as_str(), available), ("unknown", vec!["fill".to_owned()]));
        }
        other => panic!("{other:?}"),
    }
    let text = Kernels::load(&context, &ptx(".version 99")).unwrap_err().to_string();
    assert!(text.contains("is PTX 8.6, which is newer than the driver (CUDA 13.0)"), "{text}");
    let text = Kernels::load(&context, &ptx("broken")).unwrap_err().to_string();
    assert!(text.contains("CUDA_ERROR_INVALID_PTX") && text.contains("line 1: broken"), "{text}");
    assert!(log_of(0).is_empty(), "{:?}", log_of(0));
}
