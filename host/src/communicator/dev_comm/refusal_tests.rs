//! Tests of which requirements are refused, with made-up properties for each kind of machine.

use devcomm_types::{GinConnectionType as Connection, GinType, Team};

use super::check::check;
use super::resources::MAX_BUFFER_BYTES;
use super::*;
use crate::communicator::Properties;
use crate::communicator::properties::GinTypes;

/// Returns eight ranks of one NVLink domain, no network card.
pub(super) fn one_node() -> Properties {
    Properties {
        rank: 5,
        n_ranks: 8,
        cuda_device: 5,
        nvml_device: 5,
        device_api: true,
        multimem: false,
        n_lsa_teams: 1,
        gin_type: GinType::None,
        railed_gin_type: GinType::None,
        gin_types: GinTypes::EMPTY,
        host_rma: true,
        comm_hash: 1,
        gin_min_stride: None,
        gin_connection_type: Connection::None,
        dev_comm_runtime_version_size: 248,
        cft: false,
        cft_multicast: false,
        cft_counted: false,
    }
}

/// Returns two LSA teams of four, and a network on which every rank reaches every other.
fn two_nodes(types: &[GinType]) -> Properties {
    Properties {
        n_lsa_teams: 2,
        gin_type: types[0],
        railed_gin_type: types[0],
        gin_types: types.iter().copied().collect(),
        gin_min_stride: Some(1),
        gin_connection_type: Connection::Full,
        ..one_node()
    }
}

/// Returns two LSA teams of four, and a network that connects rails only.
fn rails(gin_type: GinType) -> Properties {
    Properties {
        gin_type: GinType::None,
        gin_min_stride: Some(4),
        gin_connection_type: Connection::Rail,
        ..two_nodes(&[gin_type])
    }
}

fn facilities(nvls_enable: Option<&str>) -> Facilities {
    let why_no_gin = |gin_type: Option<GinType>| {
        gin_type.map_or_else(|| "all need more".to_owned(), |one| format!("{one} needs more"))
    };
    Facilities { nvls_enable: nvls_enable.map(str::to_owned), why_no_gin }
}

fn refusal(asked: &DevCommRequirements, on: &Properties) -> RequirementsRefusal {
    check(asked, on, &facilities(None)).unwrap_err()
}

/// Checks that `asked` is refused, with all of these words in the message.
fn refused(asked: DevCommRequirements, on: Properties, words: &[&str]) {
    let text = refusal(&asked, &on).to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}

fn accepted(asked: DevCommRequirements, on: Properties) {
    assert_eq!(check(&asked, &on, &facilities(None)), Ok(()), "{asked:?} on {on:?}");
}

fn new() -> DevCommRequirements {
    DevCommRequirements::new()
}

fn with_connection(connection: Connection) -> DevCommRequirements {
    new().gin_connection(connection)
}

#[test]
fn without_a_device_api_everything_is_refused() {
    let machine = Properties { device_api: false, ..one_node() };
    refused(new(), machine, &["deviceApiSupport is false", "NCCL_CUMEM_ENABLE"]);
}

#[test]
fn one_node_without_a_network_card_serves_load_and_store() {
    accepted(new(), one_node());
    accepted(new().lsa_barriers(64).lsa_ll_a2a(8, 128), one_node());
    let mut asked = new();
    asked.add(LsaBarriers { team: Team { n_ranks: 4, rank: 2, stride: 2 }, count: 3 });
    asked.add(LlA2a { blocks: 4, max_elements: 64, element_size: 16 });
    asked.add(ResourceBuffer { bytes: 1 << 20, align: 4096 });
    asked.add(TeamMultimem { team: one_node().world_team(), multimem: false });
    accepted(asked, one_node());
}

#[test]
fn a_network_asked_for_on_one_node_without_a_card_says_what_each_back_end_needs() {
    let words = ["all in one LSA team", "all need more", "type FULL"];
    refused(with_connection(Connection::Full), one_node(), &words);
    let gdaki = with_connection(Connection::Full).gin_type(GinType::Gdaki);
    refused(gdaki, one_node(), &["GDAKI needs more"]);
    refused(with_connection(Connection::Rail), one_node(), &["type RAIL"]);
    let apart = Properties { n_lsa_teams: 2, ..one_node() };
    let text = refusal(&with_connection(Connection::Full), &apart).to_string();
    assert!(!text.contains("one LSA team"), "{text}");
}

#[test]
fn network_resources_without_a_connection_are_named() {
    let machine = || two_nodes(&[GinType::Proxy]);
    refused(new().gin_signals(1), machine(), &["gin_signals need", "gin_connection("]);
    refused(new().gin_counters(1), machine(), &["gin_counters need"]);
    refused(new().rail_gin_barriers(1), machine(), &["rail_gin_barriers need"]);
    refused(new().world_gin_barriers(1), machine(), &["world_gin_barriers need"]);
    refused(new().barriers(4), machine(), &["barriers need"]);
    let mut asked = new();
    asked.add(GinBarriers { team: machine().rail_team(), count: 1 });
    refused(asked, machine(), &["added as resources"]);
    // Where load and store suffice, the hint differs.
    refused(new().barriers(4), one_node(), &["lsa_barriers(4)", "all 8 ranks are in one LSA team"]);
    // A request for 0 signals needs no network.
    let mut asked = new();
    asked.add(Signals { count: 0 });
    accepted(asked, one_node());
}

#[test]
fn every_back_end_but_efa_serves_the_defaults_and_everything_of_the_network() {
    for gin_type in [GinType::Proxy, GinType::Gdaki, GinType::Gpi, GinType::Other(9)] {
        let machine = || two_nodes(&[gin_type]);
        let asked = with_connection(Connection::Full)
            .barriers(8)
            .rail_gin_barriers(8)
            .world_gin_barriers(8)
            .gin_signals(100)
            .gin_counters(100)
            .gin_va_signals(true)
            .gin_exclusive_contexts(true)
            .gin_type(gin_type);
        accepted(asked, machine());
        accepted(with_connection(Connection::Rail).rail_gin_barriers(8), machine());
        accepted(with_connection(Connection::CustomStride).gin_custom_stride(2), machine());
    }
}

#[test]
fn efa_is_taken_if_neither_strong_nor_va_signals_are_needed() {
    let machine = || two_nodes(&[GinType::EfaGda]);
    let words = ["strong signals were asked for", "EFA_GDA", "gin_strong_signals"];
    refused(with_connection(Connection::Full), machine(), &words);
    let weak = with_connection(Connection::Full).gin_strong_signals(false);
    refused(weak.clone().gin_va_signals(true), machine(), &["VA signals were asked for"]);
    refused(
        with_connection(Connection::Full).gin_va_signals(true),
        machine(),
        &["strong and VA signals"],
    );
    accepted(weak, machine());
    // If another back end is available, NCCL skips EFA.
    let both = || two_nodes(&[GinType::EfaGda, GinType::Proxy]);
    accepted(with_connection(Connection::Full).gin_va_signals(true), both());
    refused(
        with_connection(Connection::Full).gin_type(GinType::EfaGda),
        both(),
        &["strong signals"],
    );
}

#[test]
fn a_back_end_that_is_not_available_is_refused_and_the_available_ones_are_named() {
    let machine = || two_nodes(&[GinType::Gdaki, GinType::Proxy]);
    let asked = with_connection(Connection::Full).gin_type(GinType::Gpi);
    refused(asked, machine(), &["GPI was asked for", "the available ones are: PROXY, GDAKI"]);
    accepted(with_connection(Connection::Full).gin_type(GinType::Proxy), machine());
    refused(
        with_connection(Connection::Full).gin_type(GinType::Other(77)),
        machine(),
        &["type 77"],
    );
}

#[test]
fn a_network_of_rails_serves_rails() {
    for gin_type in [GinType::Proxy, GinType::Gdaki] {
        let words = ["connects rails only", &format!("railedGinType is {gin_type}")];
        refused(with_connection(Connection::Full).gin_signals(1), rails(gin_type), &words);
        accepted(
            with_connection(Connection::Rail).gin_signals(1).rail_gin_barriers(2),
            rails(gin_type),
        );
        // Hybrid barriers use load and store within a team, and rails between teams.
        accepted(with_connection(Connection::Rail).barriers(2), rails(gin_type));
        let world = with_connection(Connection::Rail).world_gin_barriers(2);
        refused(world, rails(gin_type), &["does not reach every rank", "type RAIL with stride 4"]);
    }
    #[expect(deprecated, reason = "NCCL still reads it")]
    let forced = new().gin_force_enable(true);
    assert_eq!(
        refusal(&forced, &rails(GinType::Proxy)),
        RequirementsRefusal::OnlyRail { railed: GinType::Proxy }
    );
}

#[test]
fn world_barriers_are_refused_where_nccl_refuses_them_and_where_they_would_hang() {
    let machine = || two_nodes(&[GinType::Proxy]);
    accepted(with_connection(Connection::Full).world_gin_barriers(1), machine());
    let custom = |stride| {
        with_connection(Connection::CustomStride).gin_custom_stride(stride).world_gin_barriers(1)
    };
    accepted(custom(1), machine());
    refused(custom(2), machine(), &["CUSTOM_STRIDE with stride 2"]);
    // RAIL is refused even if a rail has all ranks.
    let alone = Properties { n_lsa_teams: 8, ..machine() };
    refused(
        with_connection(Connection::Rail).world_gin_barriers(1),
        alone,
        &["type RAIL with stride 1"],
    );
}

#[test]
fn gin_barriers_are_for_teams_that_the_connection_reaches() {
    let machine = two_nodes(&[GinType::Proxy]);
    let asked = |connection, team| {
        let mut asked = with_connection(connection).gin_custom_stride(2);
        asked.add(GinBarriers { team, count: 1 });
        asked
    };
    let (world, rail) = (machine.world_team(), machine.rail_team());
    let every_other = world.outer_factor(2);
    for (connection, team) in [
        (Connection::Full, world),
        (Connection::Full, rail),
        (Connection::Rail, rail),
        (Connection::CustomStride, rail),
        (Connection::CustomStride, every_other),
        (Connection::Rail, world.inner_factor(1)),
    ] {
        accepted(asked(connection, team), machine);
    }
    for (connection, team) in [
        (Connection::Rail, world),
        (Connection::Rail, every_other),
        (Connection::CustomStride, world),
    ] {
        refused(asked(connection, team), machine, &["the connection reaches multiples of"]);
    }
}

#[test]
fn a_custom_stride_fits_the_network_and_the_lsa_team() {
    let asked = |stride| with_connection(Connection::CustomStride).gin_custom_stride(stride);
    let machine =
        |least| Properties { gin_min_stride: Some(least), ..two_nodes(&[GinType::Proxy]) };
    for stride in [1, 2, 3, 4] {
        accepted(asked(stride), machine(1));
    }
    accepted(asked(2), machine(2));
    refused(asked(0), machine(1), &["gin_custom_stride(0)", "multiple of 1 between 1 and 4"]);
    refused(asked(5), machine(1), &["gin_custom_stride(5)", "size of an LSA team"]);
    refused(asked(3), machine(2), &["a multiple of 2 between 2 and 4"]);
    refused(asked(2), rails(GinType::Proxy), &["a multiple of 4 between 4 and 4"]);
    accepted(asked(4), rails(GinType::Proxy));
    let not_strided = Properties { gin_min_stride: None, ..machine(1) };
    refused(asked(2), not_strided, &["ginMinStride is INT_MAX"]);
    // A stride is checked only for CUSTOM_STRIDE.
    accepted(with_connection(Connection::Full).gin_custom_stride(77), machine(1));
}

#[test]
fn a_connection_of_another_kind_or_without_contexts_is_refused() {
    let machine = || two_nodes(&[GinType::Proxy]);
    refused(with_connection(Connection::Other(9)), machine(), &["no network connection of type 9"]);
    refused(with_connection(Connection::Full).gin_contexts(0), machine(), &["gin_contexts(0)"]);
    accepted(new().gin_contexts(0), machine());
}

#[test]
fn multicast_is_served_where_the_gpus_have_it_and_it_is_not_switched_off() {
    let without = one_node();
    let has = Properties { multimem: true, ..without };
    let team = Team { n_ranks: 2, rank: 1, stride: 1 };
    let mut of_a_team = new();
    of_a_team.add(TeamMultimem { team, multimem: true });
    for (asked, what) in [(new().lsa_multimem(true), "lsa_multimem"), (of_a_team, "a team with")] {
        assert_eq!(check(&asked, &has, &facilities(None)), Ok(()));
        assert_eq!(check(&asked, &has, &facilities(Some("1"))), Ok(()));
        refused(asked.clone(), without, &[what, "multimemSupport is false", "NVLink"]);
        let text = check(&asked, &has, &facilities(Some(" 0 "))).unwrap_err().to_string();
        assert!(text.contains(what) && text.contains("NCCL_NVLS_ENABLE is 0"), "{text}");
    }
    // Without a multicast requirement, nothing is refused.
    assert_eq!(check(&new().lsa_barriers(1), &has, &facilities(Some("0"))), Ok(()));
}

#[test]
fn cft_is_accepted_where_it_is_supported() {
    let has = Properties { cft: true, cft_multicast: true, multimem: true, ..one_node() };
    accepted(new().cft(true).cft_multimem(true).cft_barriers(4), has);
    refused(new().cft(true), one_node(), &["cft was asked for", "cftSupport is false", "13.3"]);
    refused(new().cft_barriers(1), one_node(), &["cft_barriers"]);
    let unicast = Properties { cft_multicast: false, ..has };
    refused(new().cft_multimem(true), unicast, &["cftMulticastSupport is false"]);
    let asked = new().cft_multimem(true);
    let text = check(&asked, &has, &facilities(Some("0"))).unwrap_err().to_string();
    assert!(text.contains("cft_multimem needs multicast"), "{text}");
}

#[test]
fn teams_consist_of_ranks_of_the_communicator_and_where_required_of_the_lsa_team() {
    let machine = two_nodes(&[GinType::Proxy]);
    let barriers = |team| {
        let mut asked = with_connection(Connection::Full);
        asked.add(LsaBarriers { team, count: 1 });
        asked
    };
    accepted(barriers(machine.lsa_team()), machine);
    accepted(barriers(machine.lsa_team().outer_factor(2)), machine);
    refused(barriers(machine.world_team()), machine, &["LSA barriers of", "LSA team has 4 ranks"]);
    refused(barriers(machine.rail_team()), machine, &["by load and store"]);
    for (n_ranks, rank, stride) in [
        (0, 0, 1),
        (-1, 0, 1),
        (4, 4, 1),
        (4, -1, 1),
        (4, 1, 0),
        (9, 5, 1),
        (4, 0, 1),
        (2, 0, 8),
        (2, 0, -6),
        // Numbers that overflow.
        (i32::MAX, 0, 2),
        (3, 0, i32::MAX),
        (3, 1, i32::MIN),
        (i32::MAX, i32::MAX - 1, i32::MAX),
    ] {
        let team = Team { n_ranks, rank, stride };
        let mut asked = with_connection(Connection::Full);
        asked.add(GinBarriers { team, count: 0 });
        assert_eq!(refusal(&asked, &machine), RequirementsRefusal::NotATeam { team });
    }
    // A negative stride is allowed.
    let backwards = Team { n_ranks: 4, rank: 2, stride: -1 };
    accepted(barriers(backwards), machine);
}

#[test]
fn counts_that_nccl_cannot_hold_are_refused_by_name() {
    let machine = || two_nodes(&[GinType::Gdaki]);
    let too_many = u32::MAX;
    for (asked, what) in [
        (new().barriers(too_many), "hybrid barriers"),
        (new().lsa_barriers(too_many), "LSA barriers"),
        (new().rail_gin_barriers(too_many), "rail GIN barriers"),
        (new().world_gin_barriers(too_many), "world GIN barriers"),
        (new().lsa_ll_a2a(too_many, 1), "LL all-to-all blocks"),
        (new().lsa_ll_a2a(1, too_many), "LL all-to-all slots"),
        (new().gin_contexts(too_many), "GIN contexts"),
        (new().gin_signals(too_many), "GIN signals"),
        (new().gin_counters(too_many), "GIN counters"),
        (new().gin_queue_depth(too_many), "operations of a GIN queue"),
        (new().gin_custom_stride(too_many), "ranks of a custom stride"),
        (new().cft_barriers(too_many), "CFT barriers"),
    ] {
        let asked_for = format!("4294967295 {what} were asked for");
        refused(asked, machine(), &[&asked_for, "the limit is 2147483647"]);
    }
    let mut asked = with_connection(Connection::Full);
    asked.add(Signals { count: too_many });
    refused(asked, machine(), &["4294967295 signals"]);
    let mut asked = new();
    asked.add(LlA2a { blocks: 1, max_elements: too_many, element_size: too_many });
    refused(asked, machine(), &["slots of an LL all-to-all"]);
    let mut asked = with_connection(Connection::Full);
    asked.add(GinBarriers { team: machine().world_team(), count: 1 << 30 });
    refused(asked, machine(), &["signals of a team's GIN barriers"]);
}

#[test]
fn sums_that_nccl_would_not_notice_are_refused() {
    let signals = |count| with_connection(Connection::Full).gin_contexts(1).gin_signals(count);
    // Each fits an int, the sum does not.
    let mut asked = signals(i32::MAX as u32);
    asked.add(Signals { count: 1 });
    refused(asked, two_nodes(&[GinType::Gdaki]), &["2147483648 signals"]);
    // The barriers' signals count too: one per barrier and rank of the team.
    let asked = signals((1 << 16) - 16).rail_gin_barriers(8);
    accepted(asked.clone(), two_nodes(&[GinType::Gpi]));
    refused(asked.gin_signals((1 << 16) - 15), two_nodes(&[GinType::Gpi]), &["65537", "65536"]);
    // PROXY has 24-bit signal ids and 23-bit counter ids.
    refused(signals((1 << 24) + 1), two_nodes(&[GinType::Proxy]), &["the limit is 16777216"]);
    let counters = with_connection(Connection::Full).gin_counters((1 << 23) + 1);
    refused(counters, two_nodes(&[GinType::Proxy]), &["counters", "the limit is 8388608"]);
    accepted(signals((1 << 24) + 1), two_nodes(&[GinType::Proxy, GinType::Gdaki]));
    // Handles are 32-bit offsets in units of 128 bytes.
    let buffer = |bytes| {
        let mut asked = new();
        asked.add(ResourceBuffer { bytes, align: 128 });
        asked.add(ResourceBuffer { bytes: 1, align: 128 });
        asked
    };
    accepted(buffer(MAX_BUFFER_BYTES as usize - 128), one_node());
    refused(buffer(MAX_BUFFER_BYTES as usize), one_node(), &["bytes of resource buffers"]);
    refused(buffer(usize::MAX), one_node(), &["bytes of resource buffers"]);
}

#[test]
fn an_alignment_is_a_power_of_two() {
    for align in [0, 3, 384, usize::MAX] {
        let mut asked = new();
        asked.add(ResourceBuffer { bytes: 128, align });
        assert_eq!(refusal(&asked, &one_node()), RequirementsRefusal::BadAlign { align });
    }
}
