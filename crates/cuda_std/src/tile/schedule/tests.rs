use super::*;

#[test]
fn every_step_of_every_tile_is_computed_once() {
    for (tiles, steps, clusters, splits) in
        [(1, 1, 1, 1), (64, 64, 66, 2), (192, 56, 66, 2), (224, 128, 30, 4), (7, 3, 2, 4)]
    {
        let whole = Schedule::whole_tiles(tiles, clusters, splits);
        let mut counts = vec![0; (tiles * steps) as usize];
        for block in 0..clusters * splits {
            let (cluster, rank) = (block / splits, block % splits);
            let schedule = Schedule { tiles, whole, steps, cluster, clusters, rank, splits };
            let mut work = schedule.first();
            while let Some(now) = work {
                for step in now.first..now.end {
                    counts[(now.tile * steps + step) as usize] += 1;
                }
                assert!(!now.split || schedule.splits_any());
                work = schedule.next(now);
            }
        }
        assert!(counts.iter().all(|&count| count == 1), "{tiles} {steps} {clusters} {splits}");
    }
}

#[test]
fn only_a_last_round_that_is_not_full_is_split() {
    assert_eq!(Schedule::whole_tiles(192, 66, 2), 132);
    assert_eq!(Schedule::whole_tiles(128, 66, 2), 128);
    assert_eq!(Schedule::whole_tiles(64, 66, 2), 0);
    assert_eq!(Schedule::whole_tiles(200, 30, 4), 120);
    assert_eq!(Schedule::whole_tiles(448, 132, 1), 448);
}
