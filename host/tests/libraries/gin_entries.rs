//! Tests of GIN kernels: a launch selects the entry point for the device communicator's back end.

use std::sync::LazyLock;

use devcomm_host::{
    Context, Error, GinType, KernelSet, Kernels, LaunchError, LaunchRefusal, Result,
};

use devcomm_types::Kernel;

use crate::support::{FakeDevComm, Ping, log_of, set, tests};

tests! {
    a_launch_takes_the_entry_for_the_back_end_of_the_device_communicator,
    a_back_end_without_an_entry_is_refused_with_both_names,
    connections_of_several_back_ends_are_refused,
    a_device_communicator_without_gin_is_refused,
    the_largest_grid_is_that_of_any_back_end,
}

/// The sidecar of a build with two back ends.
const SIDECAR: &str = r#"{"arch":"sm_90","ptx_isa":"8.6","nccl":{"version":"2.32.3"},"kernels":[
    {"name":"ping_proxy","params":[
        {"name":"comm","type":"DevComm","size":248},{"name":"count","type":"usize","size":8}]},
    {"name":"ping_gdaki","params":[
        {"name":"comm","type":"DevComm","size":248},{"name":"count","type":"usize","size":8}]}]}"#;
static KERNELS: LazyLock<KernelSet> = LazyLock::new(|| set("ping", ".version 8.6", SIDECAR, None));

/// Launches `Ping` with a device communicator that has connections of these `ncclGinType_t`s.
fn launch(connections: &[u8]) -> Result<()> {
    let context = Context::new(0)?;
    let (kernels, stream) = (Kernels::load(&context, &KERNELS)?, context.stream()?);
    let dev = FakeDevComm::new(0, connections);
    // SAFETY: the stub driver runs no kernel.
    unsafe { Ping::with_args((&dev, 7_usize)).grid(2).block(32).launch(&kernels.on(&stream)) }
}

fn launched() -> Vec<String> {
    let lines = log_of(0).into_iter();
    lines.filter_map(|line| Some(line.strip_prefix("cuLaunchKernelEx ")?.to_owned())).collect()
}

fn refusal(connections: &[u8]) -> LaunchRefusal {
    match launch(connections) {
        Err(Error::Launch(LaunchError::Refused { kernel: "ping", refusal }))
            if launched().is_empty() =>
        {
            refusal
        }
        other => panic!("{other:?}, {:?}", launched()),
    }
}

fn a_launch_takes_the_entry_for_the_back_end_of_the_device_communicator() {
    for connections in [&[2][..], &[3], &[3, 3, 3, 3]] {
        launch(connections).unwrap();
    }
    let entries = ["ping_proxy", "ping_gdaki", "ping_gdaki"];
    assert_eq!(launched(), entries.map(|entry| format!("{entry} grid 2 block 32")));
}

fn a_back_end_without_an_entry_is_refused_with_both_names() {
    let entries = vec![GinType::Proxy, GinType::Gdaki];
    assert_eq!(refusal(&[4]), LaunchRefusal::NoGinEntry { entries, dev_comm: GinType::Gpi });
}

fn connections_of_several_back_ends_are_refused() {
    let connections = vec![GinType::Gdaki, GinType::Proxy];
    assert_eq!(refusal(&[3, 2]), LaunchRefusal::MixedGin { connections });
}

fn a_device_communicator_without_gin_is_refused() {
    assert_eq!(refusal(&[]), LaunchRefusal::NoGin);
}

fn the_largest_grid_is_that_of_any_back_end() {
    let kernels = Kernels::load(&Context::new(0).unwrap(), &KERNELS).unwrap();
    // The stub driver has 132 multiprocessors with two blocks each.
    assert_eq!(kernels.resident_blocks::<Ping>(256, 0).unwrap(), 264);
    assert_eq!(kernels.info::<Ping>().unwrap().registers, 32);
    let names: Vec<&str> = kernels.names().collect();
    assert_eq!(names, ["ping_gdaki", "ping_proxy"]);
}
