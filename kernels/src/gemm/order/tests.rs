use super::*;

#[test]
fn parts_have_every_tile_once_and_the_first_rows_first() {
    for (rows, columns, first, height) in
        [(1, 1, 0, 1), (32, 16, 16, 16), (5, 3, 3, 2), (17, 2, 9, 4), (8, 5, 7, 1), (3, 2, 0, 9)]
    {
        let tiles = TileOrder { rows, columns };
        let positions =
            (0..rows * columns).map(|number| position_in_parts(tiles, first, height, number));
        let mut positions: Vec<_> = positions.collect();
        let turn = |row: u32| (row + rows - first) % rows / height;
        assert!(positions.is_sorted_by_key(|(row, _)| turn(*row)), "{positions:?}");
        positions.sort_unstable();
        let all = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
        assert_eq!(positions, all.collect::<Vec<_>>(), "{rows} x {columns}");
    }
}
