//! Tests of kernels that use GIN, NCCL's network API: each is compiled once for each of NCCL's back
//! ends, with an entry point of its own.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use cuda_builder::{Artifacts, Callee, CalleeKind, Error};
use libtest_mimic::Trial;

use crate::support::Needs::{Nccl, RustSource};
use crate::support::{Package, TestResult, body, ensure, test};

pub fn tests() -> Vec<Trial> {
    vec![
        test(
            "a_kernel_for_gin_has_an_entry_for_each_back_end",
            &[RustSource, Nccl],
            a_kernel_for_gin_has_an_entry_for_each_back_end,
        ),
        test(
            "a_kernel_for_gin_calls_its_operations_and_nothing_else",
            &[RustSource, Nccl],
            a_kernel_for_gin_calls_its_operations_and_nothing_else,
        ),
    ]
}

/// `ping` calls NCCL's C functions, `tell` the typed layer over them. `handles` only has GIN's
/// types as arguments, and is compiled once.
const SOURCE: &str = "
#![no_std]
use core::mem::MaybeUninit;
use core::ptr::null_mut;
use cuda_std::prelude::*;
use devcomm_types::SignalRange;
use devcomm_types::nccl::LsaBarrierHandle;
use nccl_device::gin::GinBackend;
use nccl_device::{Coop, DevComm, raw};

#[kernel(T = [u32, u64], B = gin)]
pub unsafe fn ping<T: Into<u64>, B: GinBackend>(comm: DevComm, value: T, signals: SignalRange) {
    unsafe {
        let mut coop = MaybeUninit::uninit();
        raw::ncclCoopAnyInitThread(coop.as_mut_ptr());
        let mut net = MaybeUninit::uninit();
        raw::ncclGin_C_init(net.as_mut_ptr(), B::MASK, comm.as_raw(), 0);
        raw::ncclGinSignal_v3(
            net.as_mut_ptr(), &comm.world_team(), 0, 0, null_mut(), 0, signals.first, true, 1,
            value.into(), coop.as_ptr(), false, null_mut(), 0, 0, 0,
        );
    }
}

#[kernel(B = gin)]
pub unsafe fn tell<B: GinBackend>(comm: DevComm) {
    comm.gin::<B>(0).signal(Coop::cta(), comm.world_team(), 0, comm.signal(0).inc());
}

#[kernel]
pub unsafe fn handles(barriers: LsaBarrierHandle, signals: SignalRange, out: *mut u32) {
    unsafe { *out = barriers.n_barriers as u32 + signals.count }
}
";

fn package() -> Package {
    let package = Package::new("gin_entries", "");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let dependency = |name: &str, package: &str, folder: &str| {
        format!("{name} = {{ package = {package:?}, path = {:?} }}\n", root.join(folder))
    };
    let manifest = format!(
        "[package]\nname = {:?}\nversion = \"0.0.0\"\nedition = \
        \"2024\"\n\n[dependencies]\n{}{}{}\n[workspace]\n",
        package.name,
        dependency("cuda_std", "devcomm-cuda-std", "crates/cuda_std"),
        dependency("devcomm-types", "devcomm-types", "crates/types"),
        dependency("nccl_device", "devcomm-nccl-device", "crates/nccl_device"),
    );
    package.write("Cargo.toml", &manifest);
    package.write("src/lib.rs", SOURCE);
    // The package has the workspace's versions of the dependencies.
    package.write("Cargo.lock", &fs::read_to_string(root.join("Cargo.lock")).unwrap());
    package
}

/// The artifacts, which are built once: two builds into one folder would conflict.
static BUILT: LazyLock<Result<Artifacts, Error>> = LazyLock::new(|| package().builder().build());

fn built() -> Result<&'static Artifacts, String> {
    BUILT.as_ref().map_err(Error::to_string)
}

fn a_kernel_for_gin_calls_its_operations_and_nothing_else() -> TestResult {
    let reports = built()?.report()?;
    let tell: Vec<_> = reports.iter().filter(|report| report.name.starts_with("tell_")).collect();
    ensure(tell.len() == 4, format!("{} entries", tell.len()))?;
    for report in tell {
        let is_expected = |callee: &Callee| callee.kind() != CalleeKind::Other;
        // PROXY's operations are inlined; those of the other back ends remain calls.
        let calls_gin = report.uses_gin() != report.name.ends_with("_proxy");
        let good = calls_gin && report.callees.iter().all(is_expected) && report.own_stack == 0;
        ensure(good, format!("{report:?}"))?;
    }
    let handles = reports.iter().find(|report| report.name == "handles");
    ensure(handles.is_some_and(|report| !report.uses_gin()), "`handles` uses GIN")
}

fn a_kernel_for_gin_has_an_entry_for_each_back_end() -> TestResult {
    let artifacts = built()?;
    let kernels = artifacts.modules.iter().flat_map(|module| &module.info.kernels);
    let names: Vec<&str> = kernels.clone().map(|kernel| kernel.name.as_str()).collect();
    let wanted = ["ping_u32", "ping_u64", "tell"].into_iter().flat_map(|kernel| {
        ["efa_gda", "gdaki", "gpi", "proxy"].map(|back_end| format!("{kernel}_{back_end}"))
    });
    let wanted: Vec<String> = std::iter::once("handles".to_owned()).chain(wanted).collect();
    ensure(names == wanted, format!("{names:?}"))?;
    let sizes: Vec<Vec<usize>> = kernels
        .take(2)
        .map(|kernel| kernel.params.iter().map(|param| param.size).collect())
        .collect();
    ensure(sizes == [vec![8, 8, 8], vec![248, 4, 8]], format!("{sizes:?}"))?;
    // Each back end has different code.
    let bodies: std::collections::HashSet<String> =
        wanted[1..5].iter().map(|entry| body(artifacts, entry)).collect();
    ensure(bodies.len() == 4, format!("{} different bodies", bodies.len()))
}
