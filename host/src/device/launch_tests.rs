//! Tests of the launch checks, with an H200's limits.

use super::*;

const H200: DeviceLimits = DeviceLimits {
    compute_capability: (9, 0),
    multiprocessors: 132,
    max_grid: [2_147_483_647, 65_535, 65_535],
    max_block: [1024, 1024, 64],
    max_threads_per_block: 1024,
    max_threads_per_multiprocessor: 2048,
    registers_per_block: 65_536,
    shared_per_block: 49_152,
    shared_per_block_optin: 232_448,
};

const SMALL: FunctionInfo = FunctionInfo {
    registers: 32,
    max_threads_per_block: 1024,
    static_shared: 0,
    local: 0,
    cluster: None,
};

fn shape(grid: impl Into<Dim3>, block: impl Into<Dim3>) -> LaunchConfig {
    LaunchConfig::new(grid, block)
}

/// Returns the name of the `LaunchRefusal` variant, or `ok`.
fn outcome(result: Result<(), LaunchRefusal>) -> String {
    match result {
        Ok(()) => "ok".to_owned(),
        Err(refusal) => {
            let name = format!("{refusal:?}");
            name.split([' ', '{']).next().unwrap_or_default().to_owned()
        }
    }
}

#[test]
fn a_shape_is_refused_for_the_first_limit_that_it_breaks() {
    let heavy = FunctionInfo { registers: 172, max_threads_per_block: 352, ..SMALL };
    let bounded = FunctionInfo { max_threads_per_block: 256, ..SMALL };
    let shared = FunctionInfo { static_shared: 48 << 10, ..SMALL };
    let table: [(&str, LaunchConfig, FunctionInfo); 24] = [
        ("ok", shape(1, 1), SMALL),
        ("ok", shape(100_000, 1024), SMALL),
        ("ok", shape((4, 4, 4), (8, 8, 8)), SMALL),
        ("Empty", shape(0, 32), SMALL),
        ("Empty", shape(32, 0), SMALL),
        ("Empty", shape((1, 0, 1), 32), SMALL),
        ("GridTooLarge", shape(u32::MAX, 1), SMALL),
        ("GridTooLarge", shape((1, 65_536), 1), SMALL),
        ("BlockTooLarge", shape(1, 1025), SMALL),
        ("BlockTooLarge", shape(1, (1, 1, 65)), SMALL),
        ("BlockTooLarge", shape(1, u32::MAX), SMALL),
        ("TooManyThreads", shape(1, (64, 64, 1)), SMALL),
        ("TooManyThreads", shape(1, 257), bounded),
        ("ok", shape(4_194_303, 1024), SMALL),
        ("TooManyThreadsInGrid", shape(4_194_304, 1024), SMALL),
        ("TooManyThreadsInGrid", shape((2_147_483_647, 65_535, 65_535), 1024), SMALL),
        ("ok", shape(1, 256), bounded),
        ("TooManyRegisters", shape(1, 512), heavy),
        ("ok", shape(1, 352), heavy),
        ("TooManyRegisters", shape(1, 353), heavy),
        ("ok", shape(1, 32).with_dynamic_shared(232_448), SMALL),
        ("TooMuchShared", shape(1, 32).with_dynamic_shared(232_449), SMALL),
        ("ok", shape(1, 32).with_dynamic_shared(232_448 - (48 << 10)), shared),
        ("TooMuchShared", shape(1, 32).with_dynamic_shared(u32::MAX), shared),
    ];
    for (expected, config, function) in table {
        let found = outcome(check_shape(&config, &function, &H200));
        assert_eq!(found, expected, "{config:?} {function:?}");
    }
}

#[test]
fn clusters_are_whole_and_of_a_size_that_the_kernel_and_the_gpu_allow() {
    let fixed = |cluster: Dim3| FunctionInfo { cluster: Some(cluster), ..SMALL };
    let clusters = |blocks| shape(24, 32).with_cluster(blocks);
    let table = [
        ("ok", clusters(1), SMALL),
        ("ok", clusters(8), SMALL),
        ("ok", shape((4, 3), 32).with_cluster(4), SMALL),
        ("ClusterSize", clusters(0), SMALL),
        ("ClusterSize", clusters(9), SMALL),
        ("ClusterSize", clusters(u32::MAX), SMALL),
        ("PartialCluster", clusters(5), SMALL),
        ("PartialCluster", shape((3, 4), 32).with_cluster(4), SMALL),
        ("ok", shape(24, 32), fixed(4.into())),
        ("ok", clusters(4), fixed(4.into())),
        ("OtherCluster", clusters(1), fixed(4.into())),
        ("OtherCluster", clusters(2), fixed((1, 2).into())),
        ("PartialCluster", shape(2, 32), fixed(4.into())),
        ("PartialCluster", shape(2, 32), fixed((1, 2).into())),
        ("ok", shape((3, 2), 32), fixed((1, 2).into())),
    ];
    for (expected, config, function) in table {
        let found = outcome(check_shape(&config, &function, &H200));
        assert_eq!(found, expected, "{config:?} {function:?}");
    }
    let ada = DeviceLimits { compute_capability: (8, 9), ..H200 };
    for (config, what) in
        [(clusters(2), "with clusters"), (shape(1, 32).with_dependent(), "dependent launch")]
    {
        let text = check_shape(&config, &SMALL, &ada).unwrap_err().to_string();
        assert!(text.contains(what) && text.contains("this one's is 8.9"), "{text}");
    }
}

#[test]
fn too_many_registers_are_explained_with_the_numbers_and_a_block_that_fits() {
    let heavy = FunctionInfo { registers: 172, ..SMALL };
    let text = check_shape(&shape(1, 512), &heavy, &H200).unwrap_err().to_string();
    for part in ["172 registers x 512 threads", "90112", "65536", "at most 352 threads"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(check_shape(&shape(1, 352), &heavy, &H200), Ok(()));
}

fn dev_comm(barriers: i32) -> DevComm {
    let mut dev_comm = DevComm::zeroed();
    dev_comm.magic = 0xcafe_beef;
    dev_comm.version = 23203;
    dev_comm.lsa_barrier.n_barriers = barriers;
    dev_comm
}

#[test]
fn a_kernel_that_communicates_is_refused_what_would_hang_or_read_another_layout() {
    const V2_32_3: NcclVersion = NcclVersion { major: 2, minor: 32, patch: 3 };
    let stamp = Some(V2_32_3);
    let older = Some(NcclVersion { minor: 30, ..V2_32_3 });
    let foreign = DevComm::zeroed();
    let (few, many, none, negative) = (dev_comm(64), dev_comm(4096), dev_comm(0), dev_comm(-1));
    let mut newer = many;
    newer.version = 23300;
    let mut hybrid = none;
    hybrid.hybrid_lsa_barrier.n_barriers = 64;
    let table = [
        ("ok", shape(64, 512), &few, true, stamp, 1),
        ("ok", shape(64, 512), &few, true, None, 1),
        ("ok", shape(264, 512), &many, true, stamp, 2),
        ("DevCommVersion", shape(64, 512), &few, true, older, 1),
        ("DevCommVersion", shape(64, 512), &newer, true, stamp, 1),
        ("NotOneDimensional", shape(64, (32, 2)), &few, true, stamp, 1),
        ("NotOneDimensional", shape((8, 2), 32), &few, true, stamp, 1),
        ("TooFewBarriers", shape(65, 512), &few, true, stamp, 1),
        ("TooFewBarriers", shape(1, 512), &none, true, stamp, 1),
        ("TooFewBarriers", shape(1, 512), &negative, true, stamp, 1),
        // The LSA barriers of hybrid barriers count too.
        ("ok", shape(64, 512), &hybrid, true, stamp, 1),
        ("TooFewBarriers", shape(65, 512), &hybrid, true, stamp, 1),
        // A kernel that uses no LSA barriers needs none.
        ("ok", shape(64, 512), &none, false, stamp, 1),
        ("NotResident", shape(133, 1024), &many, true, stamp, 1),
        ("NotResident", shape(1, 1024), &none, false, stamp, 0),
    ];
    for (expected, config, dev_comm, sessions, stamp, per_multiprocessor) in table {
        let found =
            check_communicating(&config, dev_comm, sessions, stamp, &H200, per_multiprocessor);
        assert_eq!(
            outcome(found),
            expected,
            "{config:?} {sessions} {stamp:?} {per_multiprocessor}"
        );
    }
    for (expected, dev_comm) in
        [("ok", Some(&few)), ("NoDevComm", None), ("ForeignDevComm", Some(&foreign))]
    {
        assert_eq!(outcome(check_dev_comm(dev_comm).map(drop)), expected);
    }
}

#[test]
fn a_safe_kernel_takes_one_device_communicator() {
    let comms = [dev_comm(1), dev_comm(1)];
    let [one, two] = [0, 1].map(|i| ArgInfo { dev_comm: Some(&comms[i]), ..ArgInfo::default() });
    assert_eq!(outcome(check_safe(one.and(ArgInfo::default()).and(one))), "ok");
    assert_eq!(outcome(check_safe(one.and(ArgInfo::default()).and(two))), "SeveralDevComms");
    assert_eq!(outcome(check_safe(two.and(one).and(two))), "SeveralDevComms");
}

#[test]
fn the_back_end_is_that_of_all_the_connections() {
    use GinType::{EfaGda, Gdaki, Other, Proxy};
    let check = |types: &[i32]| {
        // Array entries beyond the connections are ignored.
        let mut comm = DevComm { gin_net_device_types: [63; 4], ..dev_comm(1) };
        comm.gin_connection_count = types.len() as u8;
        for (slot, &raw) in comm.gin_net_device_types.iter_mut().zip(types) {
            *slot = raw as u8;
        }
        check_gin(&comm)
    };
    assert_eq!(check(&[2]), Ok(Proxy));
    assert_eq!(check(&[3, 3, 3, 3]), Ok(Gdaki));
    assert_eq!(check(&[5, 5]), Ok(EfaGda));
    assert_eq!(check(&[6]), Ok(Other(6)));
    assert_eq!(check(&[]), Err(LaunchRefusal::NoGin));
    let mixed = check(&[3, 3, 2]).unwrap_err();
    assert_eq!(mixed, LaunchRefusal::MixedGin { connections: vec![Gdaki, Gdaki, Proxy] });
    assert!(mixed.to_string().contains("use several (GDAKI, GDAKI, PROXY)"), "{mixed}");
    let refusal = LaunchRefusal::NoGinEntry { entries: vec![Proxy, Gdaki], dev_comm: EfaGda };
    let text = refusal.to_string();
    assert!(
        text.contains("entries for PROXY, GDAKI, but") && text.contains("is EFA_GDA"),
        "{text}"
    );
}

#[test]
fn a_grid_that_would_hang_is_explained_with_what_would_fit() {
    let many = dev_comm(4096);
    let error = check_communicating(&shape(500, 512), &many, true, None, &H200, 2).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("500 blocks") && text.contains("264 (2 on each of 132"), "{text}");
    let few = dev_comm(8);
    let error = check_communicating(&shape(9, 512), &few, true, None, &H200, 2).unwrap_err();
    assert!(error.to_string().contains("lsa_barriers(9)"), "{error}");
}
