//! Tests of requirements as passed to NCCL, of their comparison between ranks, and of handles.

use devcomm_types::nccl::{GinBarrierHandle, LlA2aHandle, LsaBarrierHandle, MultimemHandle};
use devcomm_types::{CounterRange, GinConnectionType, GinType, SignalRange, Team};

use super::resources::{Node, Resource};
use super::*;
use crate::communicator::Library;
use crate::communicator::peers::{Terms, contribution, same_call};
use crate::error::WorldError;
use crate::sys::nccl::lists::ResourceNode;
use devcomm_sys::nccl::{Requirements, ResourceRequirements};

const TEAM: Team = Team { n_ranks: 4, rank: 1, stride: 1 };

#[test]
fn unset_requirements_are_those_of_nccls_initializer_except_va_signals() {
    let raw = DevCommRequirements::new().raw().unwrap();
    let expected = Requirements { gin_va_signals_required: false, ..Requirements::new() };
    assert_eq!(format!("{raw:?}"), format!("{expected:?}"));
    let nccls = DevCommRequirements::new().gin_va_signals(true).raw().unwrap();
    assert_eq!(format!("{nccls:?}"), format!("{:?}", Requirements::new()));
}

type Change = fn(&mut Requirements);

/// Returns each setter with a value that is not the default, and the change in NCCL's struct.
fn every_setter() -> Vec<(&'static str, DevCommRequirements, Change)> {
    let new = DevCommRequirements::new;
    #[expect(deprecated, reason = "NCCL still reads it")]
    let force = new().gin_force_enable(true);
    vec![
        ("lsa_multimem", new().lsa_multimem(true), |raw| raw.lsa_multimem = true),
        ("barriers", new().barriers(2), |raw| raw.barrier_count = 2),
        ("lsa_barriers", new().lsa_barriers(3), |raw| raw.lsa_barrier_count = 3),
        ("rail_gin_barriers", new().rail_gin_barriers(4), |raw| raw.rail_gin_barrier_count = 4),
        ("world_gin_barriers", new().world_gin_barriers(5), |raw| raw.world_gin_barrier_count = 5),
        ("lsa_ll_a2a blocks", new().lsa_ll_a2a(6, 0), |raw| raw.lsa_ll_a2a_block_count = 6),
        ("lsa_ll_a2a slots", new().lsa_ll_a2a(0, 7), |raw| raw.lsa_ll_a2a_slot_count = 7),
        ("gin_connection", force, |raw| raw.gin_force_enable = true),
        ("gin_contexts", new().gin_contexts(8), |raw| raw.gin_context_count = 8),
        ("gin_signals", new().gin_signals(9), |raw| raw.gin_signal_count = 9),
        ("gin_counters", new().gin_counters(10), |raw| raw.gin_counter_count = 10),
        ("gin_connection", new().gin_connection(GinConnectionType::Rail), |raw| {
            raw.gin_connection_type = 2
        }),
        ("gin_exclusive_contexts", new().gin_exclusive_contexts(true), |raw| {
            raw.gin_exclusive_contexts = true
        }),
        ("gin_queue_depth", new().gin_queue_depth(11), |raw| raw.gin_queue_depth = 11),
        ("gin_traffic_class", new().gin_traffic_class(12), |raw| raw.gin_traffic_class = 12),
        ("gin_strong_signals", new().gin_strong_signals(false), |raw| {
            raw.gin_strong_signals_required = false
        }),
        ("gin_va_signals", new().gin_va_signals(true), |raw| raw.gin_va_signals_required = true),
        ("gin_custom_stride", new().gin_custom_stride(13), |raw| raw.gin_custom_stride = 13),
        ("gin_type", new().gin_type(GinType::EfaGda), |raw| raw.gin_type = 5),
        ("cft", new().cft(true), |raw| raw.cft_caps = 1),
        ("cft_multimem", new().cft_multimem(true), |raw| raw.cft_caps = 2),
        ("cft_barriers", new().cft_barriers(14), |raw| raw.cft_barrier_count = 14),
    ]
}

#[test]
fn each_setter_changes_its_field_of_nccls_and_no_other() {
    for (name, requirements, change) in every_setter() {
        let mut expected = DevCommRequirements::new().raw().unwrap();
        change(&mut expected);
        assert_eq!(format!("{:?}", requirements.raw().unwrap()), format!("{expected:?}"), "{name}");
    }
}

/// Checks whether ranks with these requirements agree.
fn agree(all: &[&DevCommRequirements]) -> Result<()> {
    let all = all.iter().map(|requirements| {
        contribution(Terms { options: &requirements.describe(), ..Terms::from("create") }, &[])
    });
    same_call(&all.collect::<Vec<_>>()).map(drop)
}

#[test]
fn ranks_that_differ_in_any_field_are_told_which_and_how() {
    let same = &DevCommRequirements::new();
    agree(&[same, same]).unwrap();
    for (name, requirements, _) in every_setter() {
        match agree(&[same, same, &requirements]).unwrap_err() {
            Error::World(WorldError::OptionsDiffer {
                option,
                first: (0, a),
                second: (2, b),
                ..
            }) => {
                assert!(option == name && a != b, "{option} {a} {b}");
            }
            error => panic!("{error}"),
        }
    }
}

#[test]
fn resources_are_compared_in_their_order_and_teams_by_size_and_stride() {
    let request = |team: Team, counts: &[u32]| {
        let mut requirements = DevCommRequirements::new();
        requirements.add(LsaBarriers { team, count: counts[0] });
        for count in &counts[1..] {
            requirements.add(Signals { count: *count });
        }
        requirements
    };
    let asked = request(TEAM, &[2, 3]);
    // A team's `rank` differs between ranks.
    agree(&[&asked, &request(Team { rank: 2, ..TEAM }, &[2, 3])]).unwrap();
    let error = agree(&[&asked, &request(TEAM, &[2, 4])]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "create: resource 1 is 3 signals on rank 0 and 4 signals on rank 1; pass the same on all \
         ranks"
    );
    let error = agree(&[&request(TEAM, &[2]), &asked]).unwrap_err().to_string();
    assert!(error.contains("resource 1 is nothing on rank 0 and 3 signals on rank 1"), "{error}");
}

/// Returns the node of a request in NCCL's resource list.
fn node(request: impl Into<Resource>) -> ResourceNode {
    match request.into().node().unwrap() {
        Node::Resource(node) => node,
        Node::Team(node) => panic!("{node:?}"),
    }
}

#[test]
fn nodes_have_the_sizes_that_nccl_2_32_3_gives_them() {
    let only = ResourceNode::default();
    let lsa = node(LsaBarriers { team: TEAM, count: 5 });
    assert_eq!(lsa, ResourceNode { buffer: (140, 4), ..only });
    assert_eq!(node(GinBarriers { team: TEAM, count: 5 }), ResourceNode { signals: 20, ..only });
    let a2a = LlA2a { blocks: 3, max_elements: 10, element_size: 12 };
    assert_eq!(a2a.slots(), 20);
    assert_eq!(node(a2a), ResourceNode { buffer: (3 * 41 * 16, 16), ..only });
    let buffer = ResourceBuffer { bytes: 1000, align: 256 };
    assert_eq!(node(buffer), ResourceNode { buffer: (1000, 256), ..only });
    assert_eq!(node(Signals { count: 6 }), ResourceNode { signals: 6, ..only });
    assert_eq!(node(Counters { count: 7 }), ResourceNode { counters: 7, ..only });
}

#[test]
#[cfg_attr(miri, ignore = "it calls NCCL")]
fn nodes_and_handles_are_those_of_nccls_own_functions() {
    let library = match Library::open(None) {
        Ok(library) => library,
        Err(error) => return eprintln!("SKIPPED: {error}"),
    };
    let nccl = library.nccl();
    let seen = |raw: ResourceRequirements| ResourceNode {
        buffer: (raw.buffer_size, raw.buffer_align),
        signals: raw.gin_signal_count,
        counters: raw.gin_counter_count,
    };
    for n_ranks in [1, 2, 3, 8, 72] {
        for count in [0, 1, 5, 64, 1000] {
            let team = Team { n_ranks, rank: 0, stride: 1 };
            let (mut raw, mut handle) = (ResourceRequirements::NONE, LsaBarrierHandle::default());
            // SAFETY: both outputs are live.
            let code = unsafe {
                nccl.lsa_barrier_create_requirement(team, count, &raw mut handle, &raw mut raw)
            };
            assert_eq!(code.unwrap(), 0);
            let request = LsaBarriers { team, count: count as u32 };
            assert_eq!(node(request), seen(raw));
            assert_eq!(handle.n_barriers, count);

            let (mut raw, mut handle) = (ResourceRequirements::NONE, GinBarrierHandle::default());
            // SAFETY: both outputs are live; the communicator may be NULL.
            let code = unsafe {
                nccl.gin_barrier_create_requirement(
                    std::ptr::null_mut(),
                    team,
                    count,
                    &raw mut handle,
                    &raw mut raw,
                )
            };
            assert_eq!(code.unwrap(), 0);
            assert_eq!(node(GinBarriers { team, count: count as u32 }), seen(raw));
        }
    }
    for blocks in [0, 1, 7] {
        for (max_elements, element_size) in [(0, 8), (1, 1), (10, 12), (100, 16), (33, 9)] {
            let request = LlA2a { blocks, max_elements, element_size };
            // SAFETY: the function takes numbers and no pointers.
            let slots = unsafe {
                nccl.ll_a2a_calc_slots(max_elements as i32, element_size as i32).unwrap()
            };
            assert_eq!(slots as u64, request.slots());
            let (mut raw, mut handle) = (ResourceRequirements::NONE, LlA2aHandle::default());
            // SAFETY: both outputs are live.
            let code = unsafe {
                nccl.ll_a2a_create_requirement(blocks as i32, slots, &raw mut handle, &raw mut raw)
            };
            assert_eq!(code.unwrap(), 0);
            assert_eq!(node(request), seen(raw));
            assert_eq!(u64::from(handle.n_slots), request.slots());
        }
    }
}

/// Fills each node's results, in place of NCCL, with values that depend on its list position.
fn fill_results(raw: &Requirements) {
    let (mut position, mut node) = (1, raw.resource_requirements_list);
    while !node.is_null() {
        // SAFETY: a live node of a list that ends with NULL, and live results.
        unsafe {
            *(*node).out_buffer_handle = position;
            *(*node).out_gin_signal_start = 10 * position;
            *(*node).out_gin_counter_start = 100 * position;
            node = (*node).next;
        }
        position += 1;
    }
    let (mut position, mut node) = (1, raw.team_requirements_list);
    while !node.is_null() {
        // SAFETY: a live node of a list that ends with NULL, and a live result.
        unsafe {
            if (*node).multimem {
                (*(*node).out_multimem_handle).base = std::ptr::without_provenance_mut(position);
            }
            node = (*node).next;
        }
        position += 1;
    }
}

#[test]
fn each_key_opens_its_own_resource() {
    let mut requirements = DevCommRequirements::new();
    let signals = requirements.add(Signals { count: 3 });
    let plain = requirements.add(TeamMultimem { team: TEAM, multimem: false });
    let lsa = requirements.add(LsaBarriers { team: TEAM, count: 8 });
    let multimem = requirements.add(TeamMultimem { team: TEAM, multimem: true });
    let gin = requirements.add(GinBarriers { team: TEAM, count: 2 });
    let counters = requirements.add(Counters { count: 4 });
    let a2a = requirements.add(LlA2a { blocks: 1, max_elements: 6, element_size: 16 });
    let buffer = requirements.add(ResourceBuffer { bytes: 64, align: 128 });
    let lowered = requirements.lower().unwrap();
    fill_results(lowered.lists().raw());
    assert_eq!(lowered.get(signals), Some(SignalRange { first: 10, count: 3 }));
    assert_eq!(lowered.get(lsa), Some(LsaBarrierHandle { buffer: 2, n_barriers: 8 }));
    assert_eq!(lowered.get(gin), Some(GinBarrierHandle { signal0: 30, unused: 0 }));
    assert_eq!(lowered.get(counters), Some(CounterRange { first: 400, count: 4 }));
    assert_eq!(lowered.get(a2a), Some(LlA2aHandle { buffer: 5, n_slots: 12 }));
    assert_eq!(lowered.get(buffer), Some(6));
    assert_eq!(lowered.get(plain), Some(None));
    let base = std::ptr::without_provenance_mut(2);
    assert_eq!(lowered.get(multimem), Some(Some(MultimemHandle { base })));
}

#[test]
fn a_key_of_other_requirements_opens_nothing() {
    let (mut ours, mut theirs) = (DevCommRequirements::new(), DevCommRequirements::new());
    ours.add(Signals { count: 3 });
    let other_count = theirs.add(Signals { count: 4 });
    let beyond = theirs.add(Signals { count: 3 });
    let mut kinds = DevCommRequirements::new();
    let other_kind = kinds.add(Counters { count: 3 });
    let lowered = ours.lower().unwrap();
    fill_results(lowered.lists().raw());
    assert!(lowered.get(other_count).is_none());
    assert!(lowered.get(beyond).is_none());
    assert!(lowered.get(other_kind).is_none());
}

#[test]
fn a_lowered_request_may_go_to_another_thread() {
    fn assert_send<T: Send>(_: &T) {}
    let mut requirements = DevCommRequirements::new();
    let key = requirements.add(Signals { count: 1 });
    let lowered = requirements.lower().unwrap();
    assert_send(&lowered);
    let answered = std::thread::spawn(move || {
        fill_results(lowered.lists().raw());
        lowered
    });
    let expected = SignalRange { first: 10, count: 1 };
    assert_eq!(answered.join().unwrap().get(key), Some(expected));
}
