//! Tests of device communicators: all ranks agree on the requirements before NCCL is called, and
//! get the requested resources.

use std::ops::Range;

use devcomm_host::{
    CounterRange, Counters, DevCommError, DevCommRequirements, Error, GinBarriers,
    GinConnectionType, GinType, LlA2a, LsaBarriers, Rank, RequirementsRefusal, ResourceBuffer,
    Signals, StateError, Team, TeamMultimem, WorldError,
};

use devcomm_types::nccl::MultimemHandle;

use crate::support::{assert_invalid, logged, ranks, ranks_on, simulation, world};

/// Returns the error of `create_dev_comm`, which must make no NCCL call.
fn refused(rank: &Rank, requirements: DevCommRequirements) -> Error {
    let comm = rank.communicator().unwrap();
    let (made, log) = logged(rank, || comm.create_dev_comm(requirements));
    assert!(log.is_empty(), "{log:?}");
    made.unwrap_err()
}

#[test]
fn ranks_that_ask_for_different_things_are_told_both_before_nccl_is_called() {
    ranks(3, |rank| {
        let (me, comm) = (rank.rank() as u32, rank.communicator()?);
        let differ = |requirements| match refused(rank, requirements) {
            Error::World(WorldError::OptionsDiffer { call, option, first, second }) => {
                assert_eq!(call, "create_dev_comm");
                (option, first, second)
            }
            other => panic!("{other:?}"),
        };
        let requirements = DevCommRequirements::new();
        assert_eq!(
            differ(requirements.clone().lsa_barriers(8 + me / 2)),
            ("lsa_barriers".to_owned(), (0, "8".to_owned()), (2, "9".to_owned()))
        );
        let mut with_list = requirements;
        if me > 0 {
            with_list.add(ResourceBuffer { bytes: 256, align: 128 });
        }
        let list = ("resource 0".to_owned(), (0, "nothing".to_owned()));
        let (field, first, second) = differ(with_list);
        assert_eq!((field, first), list);
        assert_eq!(second, (1, "a buffer of 256 bytes aligned to 128".to_owned()));
        // After the errors, the ranks can still create a device communicator together.
        comm.create_dev_comm(DevCommRequirements::new()).map(drop)
    });
}

#[test]
fn what_one_rank_cannot_have_no_rank_gets() {
    ranks_on(simulation().multimem(false), 3, |rank| {
        let comm = rank.communicator()?;
        let mut requirements = DevCommRequirements::new();
        let team = comm.team_lsa()?;
        let team = if rank.rank() == 1 { Team { rank: 7, ..team } } else { team };
        requirements.add(LsaBarriers { team, count: 2 });
        let expected = RequirementsRefusal::NotATeam { team: Team { rank: 7, ..team } }.to_string();
        match refused(rank, requirements) {
            Error::DevComm(DevCommError::Refused { rank: 1, why, .. }) if rank.rank() == 1 => {
                assert_eq!(why, expected);
            }
            Error::World(WorldError::CallFailed { rank: 1, others: 0, why, .. })
                if rank.rank() != 1 =>
            {
                assert!(why.ends_with(&expected), "{why}");
            }
            other => panic!("{other:?}"),
        }
        let all = why(rank, refused(rank, DevCommRequirements::new().lsa_multimem(true)));
        assert!(all.contains("multimemSupport is false"), "{all}");
        Ok(())
    });
}

/// Checks that ranges do not overlap, and end at `end` or before.
#[track_caller]
fn assert_disjoint(ranges: &[Range<u32>], end: u32) {
    let mut sorted = ranges.to_vec();
    sorted.sort_by_key(|range| range.start);
    let follows = |pair: &[Range<u32>]| pair[0].end <= pair[1].start;
    assert!(sorted.windows(2).all(follows) && sorted[sorted.len() - 1].end <= end, "{ranges:?}");
}

#[test]
fn keys_open_the_resources_that_were_asked_for() {
    ranks(2, |rank| {
        let comm = rank.communicator()?;
        let (team, world) = (comm.team_lsa()?, comm.team_world()?);
        let requirements = DevCommRequirements::new().gin_connection(GinConnectionType::Full);
        let mut requirements = requirements.gin_signals(3).gin_counters(5);
        let barriers = requirements.add(LsaBarriers { team, count: 4 });
        let buffer = requirements.add(ResourceBuffer { bytes: 200, align: 128 });
        let signals = requirements.add(Signals { count: 8 });
        let multimem = requirements.add(TeamMultimem { team, multimem: true });
        let counters = requirements.add(Counters { count: 2 });
        let gin_barriers = requirements.add(GinBarriers { team: world, count: 3 });
        let a2a = requirements.add(LlA2a { blocks: 2, max_elements: 10, element_size: 12 });
        let none = requirements.add(TeamMultimem { team, multimem: false });
        let (dev, log) = logged(rank, || comm.create_dev_comm(requirements));
        let dev = dev?;
        assert_eq!(log.last().unwrap(), "ncclDevCommCreate 0 barriers 6 resources 2 teams");
        // No ranges overlap, including those that were requested without a key.
        let raw = dev.dev_comm()?;
        let (signals_made, barriers_made) = (dev.resource(signals)?, dev.resource(gin_barriers)?);
        assert_eq!(signals_made.count, 8);
        // Three barriers have a signal for each of two ranks.
        let ids = [
            0..3,
            signals_made.first..signals_made.first + 8,
            barriers_made.signal0..barriers_made.signal0 + 6,
        ];
        assert_disjoint(&ids, raw.gin_signal_count);
        let CounterRange { first, count } = dev.resource(counters)?;
        assert_eq!(count, 2);
        assert_disjoint(&[0..5, first..first + 2], raw.gin_counter_count);
        let (lsa, a2a) = (dev.resource(barriers)?, dev.resource(a2a)?);
        assert_eq!((lsa.n_barriers, a2a.n_slots), (4, 20));
        // Places are in units of 128 bytes; the three resources have 80, 200 and 1,312 bytes.
        let own = dev.resource(buffer)?;
        assert_disjoint(
            &[lsa.buffer..lsa.buffer + 1, own..own + 2, a2a.buffer..a2a.buffer + 11],
            u32::MAX,
        );
        assert!(!dev.resource(multimem)?.unwrap().base.is_null());
        assert_eq!(dev.resource(none)?, None);
        dev.close()?;
        assert!(matches!(dev.resource(signals), Err(Error::State(StateError::Closed { .. }))));
        Ok(())
    });
}

#[test]
fn a_key_of_other_requirements_opens_nothing() {
    ranks(2, |rank| {
        let comm = rank.communicator()?;
        let buffer = |bytes| ResourceBuffer { bytes, align: 128 };
        let mut asked = DevCommRequirements::new();
        asked.add(buffer(256));
        let mut others = DevCommRequirements::new();
        let (same_index, no_such_index) = (others.add(buffer(512)), others.add(buffer(256)));
        let dev = comm.create_dev_comm(asked)?;
        assert_invalid(dev.resource(same_index));
        assert_invalid(dev.resource(no_such_index));
        Ok(())
    });
}

#[test]
fn a_device_communicator_has_what_was_asked_for() {
    ranks(2, |rank| {
        let comm = rank.communicator()?;
        let requirements = DevCommRequirements::new().lsa_barriers(6).lsa_multimem(true);
        let requirements = requirements.gin_connection(GinConnectionType::Full).gin_contexts(2);
        let dev = comm.create_dev_comm(requirements.gin_signals(9))?;
        let raw = dev.dev_comm()?;
        assert_eq!((raw.rank, raw.n_ranks), (rank.rank() as i32, 2));
        assert_eq!((raw.lsa_size, raw.lsa_barrier.n_barriers), (2, 6));
        let other = comm.window::<f32>(8)?;
        let multicast = |at| Ok::<_, Error>(other.lsa_multimem_pointer(at)?.unwrap());
        assert_eq!(multicast(2)?, multicast(0)? + 8);
        Ok(())
    });
}

#[test]
fn a_windows_multicast_addresses_are_at_its_place_in_the_teams_memory() {
    ranks(2, |rank| {
        let comm = rank.communicator()?;
        let team = comm.team_lsa()?;
        let mut requirements = DevCommRequirements::new().lsa_multimem(true);
        let multimem = requirements.add(TeamMultimem { team, multimem: true });
        let dev = comm.create_dev_comm(requirements)?;
        let (own, all) = (dev.resource(multimem)?.unwrap(), dev.dev_comm()?.lsa_multimem);
        // Each window has its own place, the same for both handles and on both ranks.
        let windows = [comm.window::<f32>(8)?, comm.window::<f32>(8)?];
        let mut places = Vec::new();
        for window in &windows {
            let start = window.multimem_pointer(own, 0)?.unwrap();
            assert_eq!(window.multimem_pointer(own, 7)?, Some(start + 28));
            let place = start - own.base.addr() as u64;
            let of_lsa_team = window.multimem_pointer(all, 0)?.unwrap();
            assert_eq!(of_lsa_team - all.base.addr() as u64, place);
            places.push(place);
            assert_invalid(window.multimem_pointer(own, 8));
            assert_invalid(window.multimem_pointer(MultimemHandle::NULL, 0));
        }
        assert!(places[0].abs_diff(places[1]) >= 32, "{places:?}");
        assert_eq!(comm.host_all_gather(&places)?, [places.clone(), places]);
        Ok(())
    });
}

#[test]
fn logical_endpoints_are_nccls_answer_and_wrong_ranks_and_elements_are_refused_before() {
    let ran: Result<Vec<()>, Error> = world(2).run(|rank| {
        let (comm, team) = (rank.communicator()?, rank.communicator()?.team_lsa()?);
        let window = comm.window::<f32>(8)?;
        for (endpoint, call) in [
            (window.cft_endpoint(team, 1, 7), "ncclGetCftDeviceLeInfo"),
            (window.peer_endpoint(1, 7), "ncclGetPeerDeviceLeInfo"),
            (window.multimem_endpoint(7), "ncclGetMultimemDeviceLeInfo"),
        ] {
            let Err(Error::Nccl(error)) = endpoint else { panic!("{call}: {endpoint:?}") };
            let error = error.to_string();
            assert!(error.contains(call) && error.contains("have no CFT"), "{error}");
        }
        let ((), log) = logged(rank, || {
            assert_invalid(window.cft_endpoint(team, 2, 0));
            assert_invalid(window.cft_endpoint(team, 0, 8));
            assert_invalid(window.peer_endpoint(2, 0));
            assert_invalid(window.peer_endpoint(0, 8));
            assert_invalid(window.multimem_endpoint(8));
        });
        assert!(log.is_empty(), "{log:?}");
        Ok(())
    });
    ran.unwrap();
}

/// Returns why a rank refuses its requirements.
fn why(rank: &Rank, error: Error) -> String {
    match error {
        Error::DevComm(DevCommError::Refused { rank: own, why, .. }) if own == rank.rank() => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_the_network_lacks_is_refused_on_every_rank() {
    ranks_on(simulation().network(GinConnectionType::None), 4, |rank| {
        let full = DevCommRequirements::new().gin_connection(GinConnectionType::Full);
        let none = why(rank, refused(rank, full));
        assert!(none.contains("type FULL") && none.contains("Simulation::network"), "{none}");
        let signals = why(rank, refused(rank, DevCommRequirements::new().gin_signals(1)));
        assert!(signals.contains("gin_signals need a network connection"), "{signals}");
        Ok(())
    });
    ranks_on(simulation().team_size(2), 4, |rank| {
        let team = rank.communicator()?.team_world()?;
        let mut beyond = DevCommRequirements::new();
        beyond.add(LsaBarriers { team, count: 1 });
        let beyond = why(rank, refused(rank, beyond));
        assert!(beyond.contains("this rank's LSA team has 2 ranks"), "{beyond}");
        Ok(())
    });
}

#[test]
fn a_network_of_rails_connects_no_more_than_rails() {
    let rails = simulation().team_size(2).network(GinConnectionType::Rail);
    ranks_on(rails, 4, |rank| {
        let comm = rank.communicator()?;
        let of = |connection| DevCommRequirements::new().gin_connection(connection);
        let only_rail = RequirementsRefusal::OnlyRail { railed: GinType::Proxy };
        let full = of(GinConnectionType::Full);
        assert_eq!(why(rank, refused(rank, full)), only_rail.to_string());
        let dev = comm.create_dev_comm(of(GinConnectionType::Rail).rail_gin_barriers(4))?;
        assert!(dev.is_valid());
        Ok(())
    });
}

#[test]
fn ranks_without_a_device_api_get_no_device_communicator() {
    let no_network = simulation().team_size(2).network(GinConnectionType::None);
    ranks_on(no_network, 4, |rank| {
        let why = why(rank, refused(rank, DevCommRequirements::new()));
        assert_eq!(why, RequirementsRefusal::NoDeviceApi.to_string());
        Ok(())
    });
}

#[test]
fn properties_are_what_nccl_says() {
    ranks_on(simulation().team_size(2).multimem(false), 4, |rank| {
        let properties = rank.communicator()?.properties()?;
        assert_eq!((properties.rank, properties.n_ranks), (rank.rank(), 4));
        assert_eq!((properties.n_lsa_teams, properties.lsa_size()), (2, 2));
        assert!(properties.device_api && properties.host_rma && !properties.multimem);
        assert_eq!(
            (properties.gin_type, properties.railed_gin_type),
            (GinType::Proxy, GinType::Proxy)
        );
        assert!(properties.gin_types.contains(GinType::Proxy));
        assert!(!properties.gin_types.contains(GinType::Gdaki));
        assert_eq!(properties.gin_connection_type, GinConnectionType::Full);
        assert!(!(properties.cft || properties.cft_multicast || properties.cft_counted));
        Ok(())
    });
}

#[test]
fn teams_and_their_ranks_are_nccls() {
    ranks_on(simulation().team_size(2).multimem(false), 4, |rank| {
        let (me, comm) = (rank.rank() as i32, rank.communicator()?);
        let (lsa, rail) = (comm.team_lsa()?, comm.team_rail()?);
        assert_eq!(comm.team_world()?, Team { n_ranks: 4, rank: me, stride: 1 });
        assert_eq!(lsa, Team { n_ranks: 2, rank: me % 2, stride: 1 });
        assert_eq!(rail, Team { n_ranks: 2, rank: me / 2, stride: 2 });
        let first = rank.rank() / 2 * 2;
        assert_eq!((comm.rank_to_world(lsa, 1)?, comm.rank_to_lsa(lsa, 1)?), (first + 1, 1));
        assert_eq!(comm.rank_to_world(rail, 1)?, rank.rank() % 2 + 2);
        assert_invalid(comm.rank_to_world(lsa, 2));
        let window = comm.window::<f32>(8)?;
        assert_invalid(window.lsa_pointer(2, 0));
        assert_invalid(window.lsa_pointer(0, 8));
        let across = (rank.rank() + 2) % 4;
        assert_eq!(window.peer_pointer(across, 0)?, None);
        let own = |at| Ok::<_, Error>(window.peer_pointer(rank.rank(), at)?.unwrap());
        assert_eq!(own(3)?, own(0)? + 12);
        assert_eq!(window.lsa_multimem_pointer(0)?, None);
        Ok(())
    });
}
