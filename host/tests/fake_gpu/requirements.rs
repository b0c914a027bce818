//! Device communicators: agreed on by all ranks before NCCL is called, with the resources that were
//! asked for.

use devcomm_host::{
    CommConfig, Communicator, CounterRange, Counters, DEV_COMM_VERSION, DevCommRequirements, Error,
    GinBarriers, GinConnectionType, GinType, Library, LlA2a, LsaBarriers, OLDEST_VERSION,
    RequirementsRefusal, ResourceBuffer, SignalRange, Signals, Team, TeamMultimem,
};

use crate::support::{assert_clean, is_invalid, logged, ranks, tests};

tests! {
    ranks_that_ask_for_different_things_are_told_both_before_nccl_is_called,
    what_one_rank_cannot_have_no_rank_gets,
    keys_open_the_resources_that_were_asked_for in ["FAKE_GIN_TYPE" = "2", "FAKE_MULTIMEM" = "1"],
    a_key_of_other_requirements_opens_nothing,
    a_device_communicator_has_what_was_asked_for in ["FAKE_GIN_TYPE" = "2", "FAKE_MULTIMEM" = "1"],
    what_the_network_lacks_is_refused_on_every_rank in ["FAKE_LSA_SIZE" = "2"],
    a_network_of_rails_connects_no_more_than_rails
        in ["FAKE_LSA_SIZE" = "2", "FAKE_RAILED_GIN_TYPE" = "2"],
    ranks_without_a_device_api_get_no_device_communicator in ["FAKE_NO_DEVICE_API" = "1"],
    properties_are_what_nccl_says in ["FAKE_LSA_SIZE" = "2", "FAKE_GIN_TYPE" = "3", "FAKE_CFT" = "1"],
    teams_and_their_ranks_are_ncclss in ["FAKE_LSA_SIZE" = "2"],
    an_older_library_says_what_it_is_too_old_for in ["FAKE_VERSION" = "22902"],
}

/// `create_dev_comm` must fail alike, with no call of NCCL.
fn refused(comm: &Communicator, requirements: DevCommRequirements) -> Error {
    let (made, log) = logged(comm.device(), || comm.create_dev_comm(requirements));
    assert!(log.is_empty(), "{log:?}");
    made.unwrap_err()
}

fn ranks_that_ask_for_different_things_are_told_both_before_nccl_is_called() {
    ranks(3, |rank| {
        let (me, comm) = (rank.rank() as u32, rank.communicator()?);
        let differ = |requirements| match refused(comm, requirements) {
            Error::RequirementsDiffer { field, first, second } => (field, first, second),
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
        // And the ranks are still together.
        comm.create_dev_comm(DevCommRequirements::new()).map(drop)
    });
    assert_clean();
}

fn what_one_rank_cannot_have_no_rank_gets() {
    ranks(3, |rank| {
        let comm = rank.communicator()?;
        let mut requirements = DevCommRequirements::new();
        let team = comm.team_lsa()?;
        let team = if rank.rank() == 1 { Team { rank: 7, ..team } } else { team };
        requirements.add(LsaBarriers { team, count: 2 });
        match refused(comm, requirements) {
            Error::DevCommRefused { rank: 1, others: 0, why } => {
                assert_eq!(
                    why,
                    RequirementsRefusal::NotATeam { team: Team { rank: 7, ..team } }.to_string()
                );
            }
            other => panic!("{other:?}"),
        }
        match refused(comm, DevCommRequirements::new().lsa_multimem(true)) {
            Error::DevCommRefused { rank: 0, others: 2, why } => {
                assert!(why.contains("multimemSupport is false"), "{why}");
            }
            other => panic!("{other:?}"),
        }
        Ok(())
    });
    assert_clean();
}

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
        let (dev, log) = logged(rank.device(), || comm.create_dev_comm(requirements));
        let dev = dev?;
        assert_eq!(log.last().unwrap(), "ncclDevCommCreate 0 barriers 6 resources 2 teams");
        // The fake puts buffers one after the other from 1024 on, in units of 128 bytes, and
        // numbers ids from those asked for without a key.
        let opened = dev.resource(barriers)?;
        assert_eq!((opened.n_barriers, opened.buffer), (4, 8));
        assert_eq!(dev.resource(buffer)?, 9);
        assert_eq!(dev.resource(signals)?, SignalRange { first: 3, count: 8 });
        assert_eq!(dev.resource(counters)?, CounterRange { first: 5, count: 2 });
        assert_eq!(dev.resource(gin_barriers)?.signal0, 11);
        let opened = dev.resource(a2a)?;
        assert_eq!((opened.buffer, opened.n_slots), (11, 20));
        assert_eq!(dev.resource(multimem)?.unwrap().base as u64, 2 << 60);
        assert_eq!(dev.resource(none)?, None);
        dev.close()?;
        assert!(matches!(dev.resource(signals), Err(Error::Closed { .. })));
        Ok(())
    });
    assert_clean();
}

fn a_key_of_other_requirements_opens_nothing() {
    ranks(2, |rank| {
        let comm = rank.communicator()?;
        let buffer = |bytes| ResourceBuffer { bytes, align: 128 };
        let mut asked = DevCommRequirements::new();
        asked.add(buffer(256));
        let mut others = DevCommRequirements::new();
        let (same_place, no_place) = (others.add(buffer(512)), others.add(buffer(256)));
        let dev = comm.create_dev_comm(asked)?;
        is_invalid(dev.resource(same_place));
        is_invalid(dev.resource(no_place));
        Ok(())
    });
}

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
        assert_eq!(other.lsa_multimem_pointer(2)?, Some((1 << 60) + 8));
        Ok(())
    });
}

fn why(error: Error) -> String {
    match error {
        Error::DevCommRefused { rank: 0, others: 3, why } => why,
        other => panic!("{other:?}"),
    }
}

fn what_the_network_lacks_is_refused_on_every_rank() {
    ranks(4, |rank| {
        let comm = rank.communicator()?;
        let full = DevCommRequirements::new().gin_connection(GinConnectionType::Full);
        let none = why(refused(comm, full));
        for part in ["type FULL", "PROXY by loopback needs", "GDAKI needs", "GPI needs", "; here "]
        {
            assert!(none.contains(part), "{none}");
        }
        let signals = why(refused(comm, DevCommRequirements::new().gin_signals(1)));
        assert!(signals.contains("gin_signals need a network connection"), "{signals}");
        let team = comm.team_world()?;
        let mut beyond = DevCommRequirements::new();
        beyond.add(LsaBarriers { team, count: 1 });
        let beyond = why(refused(comm, beyond));
        assert!(beyond.contains("this rank's LSA team has 2 ranks"), "{beyond}");
        Ok(())
    });
}

fn a_network_of_rails_connects_no_more_than_rails() {
    ranks(4, |rank| {
        let comm = rank.communicator()?;
        let of = |connection| DevCommRequirements::new().gin_connection(connection);
        let only_rail = RequirementsRefusal::OnlyRail { railed: GinType::Proxy };
        let full = of(GinConnectionType::Full);
        assert_eq!(why(refused(comm, full)), only_rail.to_string());
        let dev = comm.create_dev_comm(of(GinConnectionType::Rail).rail_gin_barriers(4))?;
        assert!(dev.is_valid());
        Ok(())
    });
}

fn ranks_without_a_device_api_get_no_device_communicator() {
    ranks(4, |rank| {
        let why = why(refused(rank.communicator()?, DevCommRequirements::new()));
        assert_eq!(why, RequirementsRefusal::NoDeviceApi.to_string());
        Ok(())
    });
}

fn properties_are_what_nccl_says() {
    ranks(4, |rank| {
        let properties = rank.communicator()?.properties()?;
        assert_eq!((properties.rank, properties.n_ranks), (rank.rank(), 4));
        assert_eq!((properties.n_lsa_teams, properties.lsa_size()), (2, 2));
        assert!(properties.device_api && properties.host_rma && !properties.multimem);
        assert_eq!(
            (properties.gin_type, properties.railed_gin_type),
            (GinType::Gdaki, GinType::Gdaki)
        );
        assert!(properties.gin_types.contains(GinType::Gdaki));
        assert!(!properties.gin_types.contains(GinType::Proxy));
        assert_eq!(properties.gin_connection_type, GinConnectionType::Full);
        assert!(properties.cft && properties.cft_multicast && properties.cft_counted);
        Ok(())
    });
}

fn teams_and_their_ranks_are_ncclss() {
    ranks(4, |rank| {
        let (me, comm) = (rank.rank() as i32, rank.communicator()?);
        let (lsa, rail) = (comm.team_lsa()?, comm.team_rail()?);
        assert_eq!(comm.team_world()?, Team { n_ranks: 4, rank: me, stride: 1 });
        assert_eq!(lsa, Team { n_ranks: 2, rank: me % 2, stride: 1 });
        assert_eq!(rail, Team { n_ranks: 2, rank: me / 2, stride: 2 });
        let first = rank.rank() / 2 * 2;
        assert_eq!((comm.rank_to_world(lsa, 1)?, comm.rank_to_lsa(lsa, 1)?), (first + 1, 1));
        assert_eq!(comm.rank_to_world(rail, 1)?, rank.rank() % 2 + 2);
        is_invalid(comm.rank_to_world(lsa, 2));
        let window = comm.window::<f32>(8)?;
        is_invalid(window.lsa_pointer(2, 0));
        is_invalid(window.lsa_pointer(0, 8));
        let across = (rank.rank() + 2) % 4;
        assert_eq!(window.peer_pointer(across, 0)?, None);
        assert_eq!(window.peer_pointer(rank.rank(), 3)?, Some(window.device_address() + 12));
        assert_eq!(window.lsa_multimem_pointer(0)?, None);
        Ok(())
    });
}

fn an_older_library_says_what_it_is_too_old_for() {
    let path = std::env::var("DEVCOMM_NCCL_HOME").unwrap() + "/lib/libnccl.so.2";
    match Library::load(path.as_ref(), DEV_COMM_VERSION) {
        Err(Error::NcclTooOld { needs: DEV_COMM_VERSION, .. }) => {}
        other => panic!("{other:?}"),
    }
    let library = Library::load(path.as_ref(), OLDEST_VERSION).unwrap();
    let context = devcomm_host::Context::new(0).unwrap();
    let id = library.unique_id().unwrap();
    let (config, newer) = (CommConfig::new(), CommConfig::new().rma_eager_init(true));
    let init = |config| Communicator::init_rank(&library, &context, &id, 0, 1, config);
    let unsupported = |error: Error| match error {
        Error::Unsupported { needs, has, .. } => assert!(has < needs && needs <= DEV_COMM_VERSION),
        other => panic!("{other:?}"),
    };
    unsupported(init(&newer).unwrap_err());
    let comm = init(&config).unwrap();
    unsupported(comm.properties().unwrap_err());
    unsupported(comm.create_dev_comm(DevCommRequirements::new()).unwrap_err());
    unsupported(comm.configured(&devcomm_host::CollectiveConfig::new()).unwrap_err());
    comm.window::<f32>(8).unwrap();
    comm.destroy().unwrap();
}
