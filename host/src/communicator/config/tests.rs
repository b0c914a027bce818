//! Tests of configurations: the fields that settings reach, and the settings that are refused.

use std::ffi::{CStr, c_char};

use super::*;
use crate::communicator::OLDEST_VERSION;
use crate::sys::nccl::DEV_COMM_VERSION;
use devcomm_sys::nccl::UNDEF_INT;

fn version(major: u32, minor: u32, patch: u32) -> NcclVersion {
    NcclVersion { major, minor, patch }
}

fn library(version: NcclVersion) -> Loaded<'static> {
    Loaded { version, path: Path::new("/opt/nccl/lib/libnccl.so.2") }
}

fn read(text: *const c_char) -> String {
    // SAFETY: the strings of a lowered configuration live as long as it does.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned()
}

fn refusal<T>(result: Result<T>) -> String {
    match result {
        Err(Error::InvalidInput { what }) => what,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("the configuration was accepted"),
    }
}

#[test]
fn a_configuration_with_nothing_set_leaves_everything_to_nccl() {
    assert!(CommConfig::new().is_blocking());
    let config = CommConfig::new().lower(library(DEV_COMM_VERSION)).unwrap();
    assert_eq!(format!("{:?}", config.raw()), format!("{:?}", Config::new()));
    let config = CollectiveConfig::new().lower(library(DEV_COMM_VERSION)).unwrap();
    let initial = devcomm_sys::nccl::CollConfig::new();
    assert_eq!(format!("{:?}", config.raw()), format!("{initial:?}"));
}

#[test]
fn every_setting_reaches_its_own_field() {
    let config = CommConfig::new()
        .blocking(false)
        .cga_cluster_size(8)
        .min_ctas(2)
        .max_ctas(3)
        .net_name("socket")
        .split_share(true)
        .traffic_class(104)
        .comm_name("blue")
        .collnet_enable(true)
        .cta_policy(CtaPolicy::EFFICIENCY | CtaPolicy::ZERO)
        .shrink_share(false)
        .nvls_ctas(5)
        .n_channels_per_net_peer(6)
        .nvlink_centric_sched(true)
        .graph_usage_mode(GraphUsageMode::OneGraph)
        .num_rma_ctx(0)
        .max_p2p_peers(7)
        .graph_stream_ordering(false)
        .launch_order_implicit(true)
        .num_rma_sig(9)
        .rma_eager_init(true)
        .host_cft_mode(HostCftMode::Fallback)
        .nvls_host_mode(NvlsHostMode::DISABLE);
    assert!(!config.is_blocking());
    let lowered = config.lower(library(DEV_COMM_VERSION)).unwrap();
    let raw = lowered.raw();
    assert_eq!((raw.blocking, raw.cga_cluster_size), (0, 8));
    assert_eq!((raw.min_ctas, raw.max_ctas, raw.nvls_ctas), (2, 3, 5));
    assert_eq!((read(raw.net_name), read(raw.comm_name)), ("socket".into(), "blue".into()));
    assert_eq!((raw.split_share, raw.traffic_class, raw.collnet_enable), (1, 104, 1));
    assert_eq!((raw.cta_policy, raw.shrink_share), (3, 0));
    assert_eq!((raw.n_channels_per_net_peer, raw.nvlink_centric_sched), (6, 1));
    assert_eq!((raw.graph_usage_mode, raw.num_rma_ctx, raw.max_p2p_peers), (1, 0, 7));
    assert_eq!((raw.graph_stream_ordering, raw.launch_order_implicit), (0, 1));
    assert_eq!((raw.num_rma_sig, raw.rma_eager_init), (9, 1));
    assert_eq!((raw.host_cft_mode, raw.nvls_host_mode), (3, i32::MAX));
    assert_eq!((raw.magic, raw.version), (0xcafe_beef, 23203));
}

#[test]
fn settings_newer_than_the_library_are_refused_with_the_field_and_both_versions() {
    let config = CommConfig::new().blocking(false).nvls_host_mode(NvlsHostMode::ENABLE);
    match config.lower(library(version(2, 31, 1))).map(drop) {
        Err(Error::Nccl(NcclError::Unsupported {
            what: "ncclConfig_t::nvlsHostMode",
            needs,
            has,
            path,
        })) => {
            assert_eq!((needs, has), (version(2, 32, 0), version(2, 31, 1)));
            assert_eq!(path, Path::new("/opt/nccl/lib/libnccl.so.2"));
        }
        other => panic!("{other:?}"),
    }
    let old =
        CommConfig::new().blocking(false).comm_name("blue").lower(library(OLDEST_VERSION)).unwrap();
    assert_eq!((old.raw().version, old.raw().blocking), (22800, 0));
    assert_eq!(old.raw().nvls_host_mode, UNDEF_INT);
    assert!(CommConfig::new().comm_name("blue").lower(library(version(2, 26, 5))).is_err());
    match CollectiveConfig::new().lower(library(version(2, 31, 9))) {
        Err(Error::Nccl(NcclError::Unsupported { needs, .. })) => {
            assert_eq!(needs, DEV_COMM_VERSION)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn values_out_of_range_are_refused_by_name() {
    let lower = |config: CommConfig| refusal(config.lower(library(DEV_COMM_VERSION)));
    let new = CommConfig::new;
    for (config, expected) in [
        (new().cga_cluster_size(9), "cga_cluster_size(9)"),
        (new().min_ctas(0), "min_ctas(0)"),
        (new().max_ctas(0), "max_ctas(0)"),
        (new().nvls_ctas(0), "nvls_ctas(0)"),
        (new().n_channels_per_net_peer(0), "n_channels_per_net_peer(0)"),
        (new().min_ctas(9).max_ctas(8), "min_ctas(9) is above max_ctas(8)"),
        (new().traffic_class(u32::MAX), "traffic_class(4294967295)"),
        (new().graph_stream_ordering(false), "needs graph_usage_mode"),
        (new().cta_policy(CtaPolicy::from_bits_retain(4)), "cta_policy"),
        (new().net_name("a\0b"), "net_name"),
        (new().comm_name("\0"), "comm_name"),
    ] {
        let text = lower(config);
        assert!(text.contains(expected), "{expected}: {text}");
    }
    new().cga_cluster_size(0).min_ctas(8).max_ctas(8).lower(library(DEV_COMM_VERSION)).unwrap();
}

#[test]
fn every_setting_of_a_collective_reaches_its_own_field() {
    let config = CollectiveConfig::new()
        .min_ctas(1)
        .max_ctas(2)
        .nvls_ctas(3)
        .cga_cluster_size(4)
        .alg_selection("tree")
        .force_alg_selection(false)
        .cta_policy(CtaPolicy::ZERO)
        .user_profiler_tag(u64::MAX >> 1)
        .vendor_option(1, 2, 3)
        .vendor_option(1, 3, "text");
    // SAFETY: nothing records the event in this test.
    let config = unsafe { config.launch_completion_event(64 as *mut _) };
    let lowered = config.lower(library(DEV_COMM_VERSION)).unwrap();
    let raw = lowered.raw();
    assert_eq!((raw.min_ctas, raw.max_ctas, raw.nvls_ctas, raw.cga_cluster_size), (1, 2, 3, 4));
    assert_eq!((read(raw.alg_selection), raw.force_alg_selection), ("tree".into(), 0));
    assert_eq!((raw.cta_policy, raw.user_profiler_tag), (2, u64::MAX >> 1));
    assert_eq!(raw.launch_completion_event as usize, 64);
    // SAFETY: the list lives as long as `lowered`, and its first value is a number.
    let (first, last) = unsafe { (*raw.ext, *(*raw.ext).next) };
    // SAFETY: the option was set from an integer.
    assert_eq!((first.vendor_id, first.option_id, unsafe { first.value.int }), (1, 2, 3));
    // SAFETY: as above; the second is a string.
    assert_eq!((last.option_id, read(unsafe { last.value.text })), (3, "text".into()));
    assert!(last.next.is_null());
}

#[test]
fn what_makes_no_sense_for_a_collective_is_refused_by_name() {
    let new = CollectiveConfig::new;
    for (config, expected) in [
        (new().user_profiler_tag(1 << 63), "user_profiler_tag(0x8000000000000000)"),
        (new().vendor_option(7, 1, 1).vendor_option(7, 1, "x"), "option 1 of vendor 7"),
        (new().vendor_option(7, 1, "a\0"), "vendor_option"),
        (new().alg_selection("\0"), "alg_selection"),
        (new().cga_cluster_size(9), "cga_cluster_size(9)"),
        (new().min_ctas(2).max_ctas(1), "min_ctas(2) is above max_ctas(1)"),
        (new().cta_policy(CtaPolicy::DEFAULT), "cta_policy(DEFAULT)"),
    ] {
        let text = refusal(config.lower(library(DEV_COMM_VERSION)));
        assert!(text.contains(expected), "{expected}: {text}");
    }
    new().vendor_option(7, 1, 1).vendor_option(8, 1, 1).lower(library(DEV_COMM_VERSION)).unwrap();
}
