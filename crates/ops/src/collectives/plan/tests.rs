//! Tests of plans of collectives.

use devcomm_kernels::collectives::room;

use super::*;
use crate::CollectiveKind::*;
use crate::CollectivesOptions;
use crate::collectives::rmsnorm;

/// Returns the request of a message of `vectors`, which a kernel for long ones can push too.
fn request(vectors: u32) -> Request {
    Request {
        bytes: 16 * vectors as usize,
        slots: (vectors <= 1000).then_some(vectors),
        most_blocks: 4,
        most_threads: 512,
        push: Some(plan("push:64x512")),
        ..Request::by_nccl(CollectiveKind::AllToAll, "")
    }
}

fn plan(text: &str) -> CollectivePlan {
    text.parse().unwrap()
}

#[test]
fn tables_have_nothing_but_entries_and_comments() {
    for (gpu, table) in TABLES {
        for line in table.lines() {
            let comment = line.trim().is_empty() || line.starts_with('#');
            assert!(comment || parse_entry(line).is_some(), "{gpu}: {line}");
        }
    }
}

#[test]
fn plans_are_read_as_they_are_written() {
    for text in ["nccl", "lamport:16x128", "push:64x512", "pull:128x128"] {
        assert_eq!(plan(text).to_string(), text);
    }
    for wrong in ["", "lamport", "nccl:1x32", "push:0x32", "pull:1", "ring:1x32"] {
        let error = wrong.parse::<CollectivePlan>().unwrap_err();
        assert!(error.to_string().contains(&format!("`{wrong}`")), "{error}");
    }
}

#[test]
fn short_messages_are_sent_in_one_step_and_others_by_the_kernels_that_can() {
    assert_eq!(request(3).model().plan, plan("lamport:1x64"));
    assert_eq!(request(1000).model().plan, plan("lamport:4x128"));
    assert_eq!(request(1001).model().plan, plan("push:64x512"));
    let by_nccl = Request::by_nccl(CollectiveKind::AllToAll, "as it must").model();
    assert_eq!(by_nccl.to_string(), "nccl, as it must");
    let candidates =
        request(300).candidates(None).iter().map(ToString::to_string).collect::<Vec<_>>();
    let all = ["lamport:3x128", "lamport:4x64", "lamport:2x256", "lamport:1x448", "lamport:1x512"];
    assert_eq!(candidates, [&all[..], &["push:64x512", "push:32x512", "nccl"]].concat());
    let measured = request(300).candidates(Some(plan("lamport:2x256")));
    assert_eq!(measured[..2], [plan("lamport:2x256"), plan("lamport:3x128")]);
    assert_eq!(measured.len(), candidates.len());
}

#[test]
fn plans_of_several_objects_leave_room_for_each_other() {
    const MULTIPROCESSORS: u32 = 132;
    for (objects, (_, room)) in (2..=4).flat_map(|n| room::ALL.map(|kernel| (n, kernel))) {
        let options = CollectivesOptions::new().concurrent(objects);
        let most_threads = options.threads(room);
        // One launch of an object runs, and the next one waits.
        assert!(most_threads >= 64 && 2 * objects * most_threads <= room);
        let blocks = options.blocks();
        assert!(blocks <= MULTIPROCESSORS);
        let most = |algorithm| Some(CollectivePlan { algorithm, blocks, threads: most_threads });
        let most_blocks = options.most_blocks(2, MULTIPROCESSORS);
        assert_eq!(most_blocks, MULTIPROCESSORS);
        let fits =
            |plan: &CollectivePlan| plan.blocks <= MULTIPROCESSORS && plan.threads <= most_threads;
        for slots in (0..24).map(|power| 1 << power) {
            let bytes = 16 * slots as usize;
            let request = Request {
                bytes,
                slots: Some(slots),
                most_blocks,
                most_threads,
                push: most(Algorithm::Push),
                pull: most(Algorithm::Pull),
                ..Request::by_nccl(CollectiveKind::AllReduce, "")
            };
            for (_, table) in TABLES {
                for (.., plan) in table.lines().filter_map(parse_entry) {
                    let adapted = request.adapt(plan);
                    assert!(adapted.is_some_and(|plan| fits(&plan)), "{plan:?}");
                }
            }
            let candidates = request.candidates(None);
            assert!(candidates.iter().all(fits), "{candidates:?}");
            let long = Request { slots: None, ..request };
            assert!(long.candidates(None).iter().all(fits));
        }
    }
}

#[test]
fn rows_of_rmsnorm_leave_room_for_other_objects() {
    const MULTIPROCESSORS: u32 = 132;
    for objects in 2..=4 {
        let share = CollectivesOptions::new().concurrent(objects).threads(room::LAMPORT_RMSNORM);
        let most = |cluster, _| MULTIPROCESSORS - 8 * (cluster - 1);
        for (vectors, tokens) in (1..=2048).flat_map(|n| [1, 9, 33, 4096].map(|tokens| (n, tokens)))
        {
            let (cluster, threads, blocks) = rmsnorm::grid(16 * vectors, tokens, share, most);
            assert!(threads * cluster >= vectors as u32 && blocks % cluster == 0);
            let fits = threads <= share && blocks > 0 && blocks <= MULTIPROCESSORS;
            // A row that needs more threads than eight blocks may have is normalised by itself.
            let is_long = vectors as u32 > 8 * share;
            assert!(if is_long { blocks == 0 } else { fits }, "{vectors} vectors of {objects}");
        }
    }
}

#[test]
fn four_h200_sum_long_messages_by_loads_where_these_were_faster() {
    let by = |gpu, ranks, bytes: usize, pull: bool| {
        let slots = (bytes <= 1 << 20).then_some(bytes.div_ceil(16) as u32);
        let request = Request {
            data_type: DataType::Float32,
            bytes,
            slots,
            rows: Some(2),
            most_blocks: 132,
            most_threads: 256,
            push: Some(plan("push:128x256")),
            pull: pull.then(|| plan("pull:128x128")),
            ..Request::by_nccl(CollectiveKind::AllReduce, "")
        };
        (Table::of(gpu, ranks).find(&request), request.model().plan)
    };
    // For other sizes, machines and memory the plan is that of the model.
    for bytes in [4, 1024, 1040, 4096, 20_000, 262_144, 300_000, 640 << 10] {
        let (table, model) = by(H200, 4, bytes, true);
        assert_eq!(table, Some(model), "{bytes}");
    }
    for bytes in [700 << 10, 1 << 20, (1 << 20) + 4, 4 << 20] {
        assert_eq!(by(H200, 4, bytes, true).0, Some(plan("pull:128x128")), "{bytes}");
        for (gpu, ranks, pull) in [(H200, 4, false), (H200, 8, true), (H100, 4, true)] {
            let (table, model) = by(gpu, ranks, bytes, pull);
            assert_eq!((table, model.algorithm == Algorithm::Pull), (None, false));
        }
    }
    assert_eq!(by(H200, 4, (4 << 20) + 4, true), (None, plan("push:128x256")));
}

#[test]
fn a_table_decides_for_the_next_larger_message_if_its_plan_can() {
    let table = "all-to-all 2 u8 4096 push:32x512 # 3 us\nall-to-all 2 u8 160 lamport:2x32\n\
                 all-to-all 4 u8 4096 nccl\nbroadcast 2 u8 4096 nccl\n\
                 all-to-all 2 u8 65536 pull:8x128\n";
    let table = Table::parse(table, 2);
    let find = |vectors| table.find(&request(vectors));
    assert_eq!(find(10), Some(plan("lamport:1x32")));
    assert_eq!(find(11), Some(plan("push:32x512")));
    // No kernel does the plan `pull`, and no larger message was measured.
    assert_eq!((find(257), find(10_000)), (None, None));
}

#[test]
fn a_plan_with_any_numbers_is_adapted_or_refused() {
    let adapt = |blocks, threads| {
        request(1000).adapt(CollectivePlan { algorithm: Algorithm::Lamport, blocks, threads })
    };
    assert_eq!(adapt(u32::MAX, u32::MAX), Some(plan("lamport:2x512")));
    assert_eq!(
        [(0, 0), (0, 64), (1, 0)].map(|(blocks, threads)| adapt(blocks, threads)),
        [None; 3]
    );
}

#[test]
fn a_name_of_no_collective_is_refused_with_the_names() {
    let all = [AllReduce, ReduceScatter, AllGather, AllToAll, Broadcast];
    for kind in all {
        assert_eq!(kind.to_string().parse(), Ok(kind));
    }
    let error = "gather".parse::<CollectiveKind>().unwrap_err().to_string();
    assert!(error.starts_with("`gather` is no collective: "), "{error}");
    assert!(all.iter().all(|kind| error.contains(&kind.to_string())), "{error}");
}

#[test]
fn only_collectives_that_may_normalise_ask_how_many_clusters_are_resident() {
    let run = |rank: &devcomm_host::Rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let product = crate::GemmReduceScatter::new(comm, &stream, 6, 8)?;
        let inner = &product.base.unfused.get().expect("it is prepared").collectives;
        let own = CollectivesOptions::new().concurrent(1).build(comm)?;
        let clusters = [inner, &own].map(|by| by.smallest.clusters(DataType::Float32, 1, 32));
        assert!(clusters[0] == 0 && clusters[1] > 0, "{clusters:?}");
        Ok::<_, Error>(())
    };
    devcomm_host::World::simulated(2).unwrap().run(run).unwrap();
}
