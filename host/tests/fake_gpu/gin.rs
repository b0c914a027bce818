//! Launches of kernels for GIN, whose entry the device communicator picks.

use devcomm_host::{
    DevCommRequirements, DevCommResource, Error, GinConnectionType, GinType, LaunchRefusal, Result,
};

use crate::support::{COUNT, GIN_KERNELS, Ping, logged, ping, ranks, tests};

tests! {
    a_launch_takes_the_entry_for_the_back_end_of_the_device_communicator
        in ["FAKE_GIN_TYPE" = "2"] ["FAKE_GIN_TYPE" = "3"]
           ["FAKE_GIN_TYPE" = "3", "FAKE_GIN_CONNECTIONS" = "3,3,3,3"],
    a_back_end_without_an_entry_is_refused_with_both_names in ["FAKE_GIN_TYPE" = "4"],
    connections_of_several_back_ends_are_refused
        in ["FAKE_GIN_TYPE" = "3", "FAKE_GIN_CONNECTIONS" = "3,2"],
    a_device_communicator_without_gin_is_refused in ["FAKE_GIN_TYPE" = "2"],
    the_largest_grid_is_that_of_any_back_end,
}

/// What comes of a launch of `Ping` with and without GIN in the device communicator, and the names
/// of what ran.
fn launches(gin: bool) -> (Result<()>, Vec<String>) {
    let mut results = ranks(1, |rank| {
        let comm = rank.communicator()?;
        let window = comm.window::<f32>(COUNT)?;
        let requirements = DevCommRequirements::new().gin_contexts(1);
        let requirements = if gin {
            requirements.gin_connection(GinConnectionType::Full)
        } else {
            DevCommRequirements::new()
        };
        let dev = comm.create_dev_comm(requirements)?;
        let (kernels, stream) = (rank.load(&GIN_KERNELS)?, rank.stream()?);
        let launch = |dev: &DevCommResource| ping(&kernels, &stream, (dev, &window));
        let (result, log) = logged(0, || launch(&dev));
        stream.synchronize()?;
        let launched = log.iter().filter_map(|line| line.strip_prefix("cuLaunchKernelEx "));
        let names = launched.filter_map(|line| Some(line.split(' ').next()?.to_owned()));
        Ok((result, names.collect()))
    });
    results.remove(0)
}

fn refusal(gin: bool) -> LaunchRefusal {
    match launches(gin) {
        (Err(Error::Launch { kernel: "ping", refusal }), names) => {
            assert!(names.is_empty(), "{names:?}");
            refusal
        }
        other => panic!("{other:?}"),
    }
}

fn a_launch_takes_the_entry_for_the_back_end_of_the_device_communicator() {
    let (result, names) = launches(true);
    result.unwrap();
    let proxy = std::env::var("FAKE_GIN_TYPE").unwrap() == "2";
    assert_eq!(names, [if proxy { "ping_proxy" } else { "ping_gdaki" }]);
}

fn a_back_end_without_an_entry_is_refused_with_both_names() {
    let entries = vec![GinType::Proxy, GinType::Gdaki];
    assert_eq!(refusal(true), LaunchRefusal::NoGinEntry { entries, dev_comm: GinType::Gpi });
}

fn connections_of_several_back_ends_are_refused() {
    let connections = vec![GinType::Gdaki, GinType::Proxy];
    assert_eq!(refusal(true), LaunchRefusal::MixedGin { connections });
}

fn a_device_communicator_without_gin_is_refused() {
    assert_eq!(refusal(false), LaunchRefusal::NoGin);
}

fn the_largest_grid_is_that_of_any_back_end() {
    ranks(1, |rank| {
        let kernels = rank.load(&GIN_KERNELS)?;
        assert_eq!(kernels.resident_blocks(Ping, 256, 0)?, 264);
        assert_eq!(kernels.info(Ping)?.registers, 32);
        let names: Vec<&str> = kernels.names().collect();
        assert_eq!(names, ["ping_gdaki", "ping_proxy"]);
        Ok(())
    });
}
