//! Tests of the plans that a machine has measured.

use devcomm_host::World;

use super::*;
use crate::GemmAllReducePlan as Plan;

fn extents(m: usize) -> Extents {
    Extents::new([m, 8, 8]).unwrap()
}

#[test]
fn a_plan_that_was_measured_is_kept_for_later_processes_of_the_same_kind() {
    let cache = tempfile::tempdir().unwrap();
    let folder = cache.path().join("plans");
    let of = |gpu, ranks| Tuned::in_folder(Some(&folder), gpu, "gemm-allreduce", ranks);
    let first = of("NVIDIA H200", 2);
    first.save(extents(7), Plan::Unfused);
    first.save(extents(9), "swapped:16x64:2".parse().unwrap());
    first.save(extents(7), Plan::Wide);
    let later = of("NVIDIA H200", 2);
    assert_eq!(text(&later.plans.borrow()), "7 8 8 wide\n9 8 8 swapped:16x64:2\n");
    assert_eq!([later.plan(extents(7)), later.plan(extents(8))], [Some(Plan::Wide), None]);
    assert_eq!([of("NVIDIA H200", 4), of("NVIDIA H100", 2)].map(|other| other.all().len()), [0, 0]);
    // Lines that are no entries are ignored.
    let file = later.file.unwrap();
    fs::write(&file, "7 8 8 tall\n# comment\n9 8 8 strips # 3 us\n").unwrap();
    assert_eq!(of("NVIDIA H200", 2).all(), [([9, 8, 8], Plan::Strips)]);
    // Objects that were made before keep what others have saved since.
    let [one, other] = [of("NVIDIA H200", 2), of("NVIDIA H200", 2)];
    one.save(extents(1), Plan::Wide);
    other.save(extents(2), Plan::Unfused);
    assert_eq!(of("NVIDIA H200", 2).all().len(), 3);
    // Where the folder cannot be made, a plan is kept for this process.
    let nowhere = Tuned::in_folder(Some(&file), "GPU", "gemm", 1);
    nowhere.save(extents(1), Plan::Wide);
    assert_eq!(nowhere.plan(extents(1)), Some(Plan::Wide));
}

#[test]
fn ranks_whose_files_differ_use_none_of_them() {
    let caches = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let of = |rank: usize| Tuned::in_folder(Some(caches[rank].path()), "GPU", "gemm", 2);
    caches.iter().enumerate().for_each(|(rank, _)| of(rank).save(extents(1), Plan::Wide));
    of(1).save(extents(2), Plan::Strips);
    World::simulated(2)
        .unwrap()
        .run(|rank| {
            let comm = rank.communicator()?;
            let agreed = |tuned: Tuned<Plan>| {
                let all = comm.host_all_gather(&[tuned.hash()])?;
                Ok::<_, devcomm_host::Error>(tuned.agreed(all.concat().into_iter()))
            };
            assert_eq!(agreed(of(0))?.plan(extents(1)), Some(Plan::Wide));
            assert_eq!(agreed(of(rank.rank()))?.plan(extents(1)), None);
            Ok::<_, devcomm_host::Error>(())
        })
        .unwrap();
}
