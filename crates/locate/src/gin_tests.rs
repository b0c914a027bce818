use super::*;

const GPUS: GinGpus = GinGpus { driver: 13_000, rdma_with_vmm: true };

/// Returns a fake system with these folders and files under its root, and these variables.
fn support(
    paths: &[&str],
    variables: &'static [(&str, &str)],
    gpus: Option<GinGpus>,
) -> (tempfile::TempDir, GinSupport) {
    let root = tempfile::tempdir().unwrap();
    for path in paths {
        fs::create_dir_all(root.path().join(path)).unwrap();
    }
    let var = |name: &str| {
        let found = variables.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| value.into())
    };
    let env = Env { var: Box::new(var), ..Env::empty() };
    let support = gin_support_in(&env, root.path(), gpus);
    (root, support)
}

fn possible(support: &GinSupport) -> Vec<GinRoute> {
    GinRoute::ALL.into_iter().filter(|&route| support.verdict(route).is_ok()).collect()
}

#[test]
fn each_device_opens_its_routes() {
    let (_root, bare) = support(&[], &[], Some(GPUS));
    assert_eq!(possible(&bare), []);
    assert!(!bare.has_rdma());

    let (_root, mlx5) = support(&["sys/class/infiniband/mlx5_0"], &[], Some(GPUS));
    assert_eq!(possible(&mlx5), [GinRoute::ProxyRdma, GinRoute::Gdaki]);
    assert!(mlx5.has_rdma());

    let (_root, efa) = support(&["sys/class/infiniband/efa_0"], &[], Some(GPUS));
    assert_eq!(possible(&efa), [GinRoute::EfaGda]);

    let gdrcopy = &[("NCCL_GDRCOPY_ENABLE", "1")];
    let (_root, tcp) = support(&["dev/gdrdrv"], gdrcopy, Some(GPUS));
    assert_eq!(possible(&tcp), [GinRoute::ProxyTcp]);
    let newer = GinGpus { driver: 13_030, ..GPUS };
    assert_eq!(possible(&support(&[], gdrcopy, Some(newer)).1), [GinRoute::ProxyTcp]);
    assert_eq!(possible(&support(&["dev/gdrdrv"], &[], Some(GPUS)).1), []);
    // NCCL compares with 1.
    let other = &[("NCCL_GDRCOPY_ENABLE", "2")];
    assert_eq!(possible(&support(&["dev/gdrdrv"], other, Some(GPUS)).1), []);

    let (_root, gpi) = support(&[], &[("NCCL_GIN_PLUGIN", "spcx")], Some(GPUS));
    assert_eq!(possible(&gpi), [GinRoute::Gpi]);
}

#[test]
fn nccls_sockets_are_the_last_that_it_tries_for_proxy() {
    const GDRCOPY: (&str, &str) = ("NCCL_GDRCOPY_ENABLE", "1");
    let card = &["dev/gdrdrv", "sys/class/infiniband/mlx5_0"];
    let (_root, with_card) = support(card, &[GDRCOPY], Some(GPUS));
    assert_eq!(possible(&with_card), [GinRoute::ProxyRdma, GinRoute::Gdaki]);
    let why = with_card.verdict(GinRoute::ProxyTcp).unwrap_err();
    assert!(why.contains("mlx5_0") && why.contains("NCCL_IB_DISABLE=1"), "{why}");

    let disabled = &[GDRCOPY, ("NCCL_IB_DISABLE", "1")];
    let (_root, without_card) = support(card, disabled, Some(GPUS));
    assert_eq!(possible(&without_card), [GinRoute::ProxyTcp]);
    assert!(without_card.verdict(GinRoute::Gdaki).unwrap_err().contains("NCCL_IB_DISABLE"));
    let (_root, enabled) = support(card, &[GDRCOPY, ("NCCL_IB_DISABLE", "0")], Some(GPUS));
    assert_eq!(possible(&enabled), [GinRoute::ProxyRdma, GinRoute::Gdaki]);

    let plugin = &[GDRCOPY, ("NCCL_RMA_PLUGIN", "libother.so")];
    let (_root, with_plugin) = support(&["dev/gdrdrv"], plugin, Some(GPUS));
    assert!(with_plugin.verdict(GinRoute::ProxyTcp).unwrap_err().contains("libother.so"));
    let none = &[GDRCOPY, ("NCCL_RMA_PLUGIN", "none")];
    let (_root, without_plugin) = support(&["dev/gdrdrv"], none, Some(GPUS));
    assert_eq!(possible(&without_plugin), [GinRoute::ProxyTcp]);
}

#[test]
fn a_device_is_known_by_its_driver_where_its_name_says_its_place() {
    for (driver, routes) in [
        ("mlx5_core", &[GinRoute::ProxyRdma, GinRoute::Gdaki] as &[_]),
        ("efa", &[GinRoute::EfaGda]),
        ("bnxt_re", &[GinRoute::ProxyRdma]),
    ] {
        let root = tempfile::tempdir().unwrap();
        let device = root.path().join("sys/class/infiniband/rocep1s0f0/device");
        let target = root.path().join("sys/bus/pci/drivers").join(driver);
        fs::create_dir_all(&device).unwrap();
        fs::create_dir_all(&target).unwrap();
        std::os::unix::fs::symlink(&target, device.join("driver")).unwrap();
        let support = gin_support_in(&Env::empty(), root.path(), Some(GPUS));
        assert_eq!(possible(&support), routes, "{driver}");
    }
}

#[test]
fn a_plugin_that_is_there_but_not_switched_on_is_said_to_be_so() {
    let root = tempfile::tempdir().unwrap();
    let plugin = root.path().join("libdevcomm_rma_loopback.so");
    // As packages install a library.
    fs::write(root.path().join("loopback.so.0.1"), "").unwrap();
    std::os::unix::fs::symlink("loopback.so.0.1", &plugin).unwrap();
    let why = |named: Option<&'static str>| {
        let program = Some(root.path().join("program"));
        let path = |name| root.path().join(name).display().to_string();
        let named = named.map(|list| list.split(',').map(path).collect::<Vec<_>>().join(","));
        let var = move |name: &str| {
            named.as_ref().filter(|_| name == "NCCL_RMA_PLUGIN").map(|list| list.into())
        };
        let env = Env { var: Box::new(var), program, ..Env::empty() };
        let support = gin_support_in(&env, root.path(), Some(GPUS));
        assert!(support.verdict(GinRoute::ProxyLoopback).is_ok());
        support.why_not(Some(2))
    };
    assert!(why(None).contains("not enabled: NCCL_RMA_PLUGIN is not set"));
    assert!(why(Some("other.so")).contains("other.so"));
    assert!(why(Some("libdevcomm_rma_loopback.so")).contains("looks possible"));
    assert!(why(Some("other.so,libdevcomm_rma_loopback.so")).contains("looks possible"));
}

#[test]
fn a_reason_that_disables_all_of_gin_is_named() {
    let card = &["sys/class/infiniband/mlx5_0"];
    for (variables, gpus, text) in [
        (&[("NCCL_GIN_ENABLE", "0")] as &'static [_], Some(GPUS), "NCCL_GIN_ENABLE=0"),
        (&[("NCCL_WIN_ENABLE", "0")], Some(GPUS), "NCCL_WIN_ENABLE=0"),
        (&[], Some(GinGpus { rdma_with_vmm: false, ..GPUS }), "WITH_CUDA_VMM_SUPPORTED"),
        (&[], None, "no GPU"),
    ] {
        let (_root, support) = support(card, variables, gpus);
        for route in GinRoute::ALL {
            let why = support.verdict(route).unwrap_err();
            assert!(why.contains(text), "{route}: {why}");
        }
    }
}

#[test]
fn a_back_end_that_nccl_is_told_to_leave_out_is_not_possible() {
    let (_root, support) =
        support(&["sys/class/infiniband/mlx5_0"], &[("NCCL_GIN_TYPE", "3")], Some(GPUS));
    assert_eq!(possible(&support), [GinRoute::Gdaki]);
    assert!(support.verdict(GinRoute::ProxyRdma).unwrap_err().contains("NCCL_GIN_TYPE=3"));
}

#[test]
fn a_missing_back_end_says_what_it_needs_and_what_is_here() {
    let (_root, support) = support(&["sys/class/infiniband/efa_0"], &[], Some(GPUS));
    let text = support.why_not(Some(3));
    assert!(text.contains("GDAKI needs an mlx5 card"), "{text}");
    assert!(text.contains("here the RDMA devices are efa_0"), "{text}");
    assert!(!text.contains("GPI"), "{text}");
    let all = support.why_not(None);
    assert!(GinRoute::ALL.iter().all(|route| all.contains(&route.to_string())), "{all}");
}
