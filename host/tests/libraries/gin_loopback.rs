//! Tests of `GinLoopback`: it sets the environment variables of NCCL and the driver, or fails.

use std::env::var;
use std::path::Path;

use devcomm_host::{Error, GinLoopback, World, WorldError};

use crate::support::tests;

tests! {
    a_world_with_loopback_sets_what_nccl_and_the_driver_read,
    tuning_variables_of_the_user_stay in ["CUDA_DEVICE_MAX_CONNECTIONS" = "8"],
    settings_that_ask_for_another_network_are_refused
        in ["NCCL_RMA_PLUGIN" = "/another.so"] ["NCCL_GIN_TYPE" = "3"] ["NCCL_LSA_TEAM_SIZE" = "4"],
    with_other_threads_running_nothing_is_set,
    variables_that_are_set_already_are_accepted_when_threads_run,
    a_plugin_that_is_not_there_is_named in ["DEVCOMM_GIN_LOOPBACK" = "/gone/plugin.so"],
}

fn loopback() -> GinLoopback {
    GinLoopback::new().lsa_team_size(2)
}

fn a_world_with_loopback_sets_what_nccl_and_the_driver_read() {
    let world = World::builder().gin_loopback(loopback()).threads(4).unwrap();
    let plugin = var("NCCL_RMA_PLUGIN").unwrap();
    assert!(Path::new(&plugin).is_file(), "{plugin}");
    assert_eq!(var("NCCL_RMA_PLUGIN_REF_COUNT").unwrap(), "1");
    assert_eq!(var("NCCL_GIN_TYPE").unwrap(), "2");
    assert_eq!(var("NCCL_LSA_TEAM_SIZE").unwrap(), "2");
    assert_eq!(var("CUDA_MODULE_LOADING").unwrap(), "EAGER");
    assert_eq!(var("CUDA_DEVICE_MAX_CONNECTIONS").unwrap(), "32");
    world.run(|rank| rank.communicator().map(drop)).unwrap();
}

fn tuning_variables_of_the_user_stay() {
    World::builder().gin_loopback(loopback()).threads(2).unwrap();
    assert_eq!(var("CUDA_DEVICE_MAX_CONNECTIONS").unwrap(), "8");
    assert_eq!(var("CUDA_MODULE_LOADING").unwrap(), "EAGER");
}

fn settings_that_ask_for_another_network_are_refused() {
    let error = World::builder().gin_loopback(loopback()).threads(2).unwrap_err();
    let Error::World(WorldError::Environment { variable, value: Some(value), .. }) = &error else {
        panic!("{error}");
    };
    assert_eq!(&var(variable).unwrap(), value);
    assert!(error.to_string().contains("GinLoopback needs"), "{error}");
    assert!(var("CUDA_MODULE_LOADING").is_err(), "a refused call must set no variable");
}

fn with_other_threads_running_nothing_is_set() {
    std::thread::scope(|scope| {
        let (end, wait) = std::sync::mpsc::channel::<()>();
        scope.spawn(move || wait.recv());
        let error = World::builder().gin_loopback(loopback()).threads(2).unwrap_err();
        assert!(
            matches!(&error, Error::World(WorldError::EnvironmentInUse { threads: Some(2), .. })),
            "{error}"
        );
        assert!(error.to_string().contains(" NCCL_GIN_TYPE=2 "), "{error}");
        assert!(var("NCCL_RMA_PLUGIN").is_err());
        drop(end);
    });
}

fn variables_that_are_set_already_are_accepted_when_threads_run() {
    loopback().enable().unwrap();
    std::thread::scope(|scope| {
        let (end, wait) = std::sync::mpsc::channel::<()>();
        scope.spawn(move || wait.recv());
        World::builder().gin_loopback(loopback()).threads(2).unwrap();
        drop(end);
    });
}

fn a_plugin_that_is_not_there_is_named() {
    let error = World::builder().gin_loopback(loopback()).threads(2).unwrap_err();
    assert!(matches!(error, Error::World(WorldError::GinLoopbackNotFound { .. })), "{error}");
    assert!(error.to_string().contains("/gone/plugin.so (DEVCOMM_GIN_LOOPBACK)"), "{error}");
    let zero = GinLoopback::new().plugin("/etc/hostname").lsa_team_size(0).enable().unwrap_err();
    assert!(matches!(zero, Error::InvalidInput { .. }), "{zero}");
}
