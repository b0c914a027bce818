//! Tests of loading kernels, from the program's PTX and from files.

use std::fs;

use devcomm_host::{
    Context, Error, KernelSet, Kernels, LaunchConfig, LaunchError, LaunchRefusal, RawArg, Result,
};

use devcomm_types::{DevComm, Kernel};

use crate::support::{FakeDevComm, Fill, SIDECAR, Unknown, log_of, tests};

tests! {
    kernels_of_a_file_are_launched_under_the_type_of_its_name,
    a_kernel_of_a_file_is_launched_by_its_name_with_arguments_of_its_sizes,
    a_file_that_cannot_be_loaded_says_why,
    ptx_is_loaded_with_its_source_lines,
    what_would_hang_or_is_not_there_is_refused_before_the_driver_sees_it,
}

const KERNELS: KernelSet = KernelSet::new((&[("fill", ".version 8.6", SIDECAR)], None));
const LINES: KernelSet = KernelSet::new((&[("fill", ".version 8.6\n.loc 1 2 3", SIDECAR)], None));
const NEWER: KernelSet = KernelSet::new((&[("fill", ".version 99", SIDECAR)], None));
const BROKEN: KernelSet = KernelSet::new((&[("fill", "broken", SIDECAR)], None));

fn kernels_of_a_file_are_launched_under_the_type_of_its_name() {
    let (folder, context) = (tempfile::tempdir().unwrap(), Context::new(0).unwrap());
    fs::write(folder.path().join("fill.json"), SIDECAR).unwrap();
    let kernels = Kernels::load_files(&context, &[folder.path().join("fill.cubin")]).unwrap();
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
    let kernels = Kernels::load_files(&context, &[folder.path().join("fill.cubin")]).unwrap();
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
    let _kernels = Kernels::load(&context, &LINES).unwrap();
    assert_eq!(log_of(0), ["cuModuleLoadDataEx with lines"]);
}

fn a_file_that_cannot_be_loaded_says_why() {
    let (folder, context) = (tempfile::tempdir().unwrap(), Context::new(0).unwrap());
    let load = |name: &str| Kernels::load_files(&context, &[folder.path().join(name)]).unwrap_err();
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

fn what_would_hang_or_is_not_there_is_refused_before_the_driver_sees_it() {
    let context = Context::new(0).unwrap();
    let (kernels, stream) = (Kernels::load(&context, &KERNELS).unwrap(), context.stream().unwrap());
    let launch = |barriers, grid| {
        let dev = FakeDevComm::new(barriers, &[]);
        let fill = Fill::with_args((&dev, 7_usize)).grid(grid).block(64);
        // SAFETY: the stub driver runs no kernel.
        refusal(unsafe { fill.launch(&kernels.on(&stream)) })
    };
    assert!(matches!(launch(1000, 265), LaunchRefusal::NotResident { .. }));
    assert!(matches!(launch(4, 5), LaunchRefusal::TooFewBarriers { .. }));
    assert_eq!(kernels.resident_blocks::<Fill>(256, 0).unwrap(), 264);
    match kernels.info::<Unknown>() {
        Err(Error::Launch(LaunchError::KernelNotFound { name, available })) => {
            assert_eq!((name.as_str(), available), ("unknown", vec!["fill".to_owned()]));
        }
        other => panic!("{other:?}"),
    }
    let text = Kernels::load(&context, &NEWER).unwrap_err().to_string();
    assert!(text.contains("is PTX 8.6, which is newer than the driver (CUDA 13.0)"), "{text}");
    let text = Kernels::load(&context, &BROKEN).unwrap_err().to_string();
    assert!(text.contains("CUDA_ERROR_INVALID_PTX") && text.contains("line 1: broken"), "{text}");
    assert!(log_of(0).is_empty(), "{:?}", log_of(0));
}
