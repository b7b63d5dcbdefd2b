//! Reading what is read once: any offset, any length, whole or an error.

mod common;

use std::fs::File;

use common::{Model, byte_at};
use millstream_io::{Access, Arena, FileId, IoError, IoMode, measure, populate};

#[test]
fn any_range_is_read_whole_in_every_mode() {
    let bytes = 100_003;
    let model = Model::new(&[10, bytes]);
    for mode in [IoMode::Auto, IoMode::Buffered] {
        let files = model.open(mode);
        assert_eq!((files.len(), files.len_bytes(FileId(1)), files.path(FileId(1))), (2, bytes, &*model.paths[1]));
        for (offset, len) in [(0, 0), (0, 1), (4095, 2), (1, 100_002), (bytes, 0), (bytes - 1, 1), (77, 8192)] {
            let mut buf = vec![0x5A; len];
            files.read_exact_at(FileId(1), offset, &mut buf).unwrap();
            assert!(buf.iter().zip(offset..).all(|(byte, at)| *byte == byte_at(1, at)), "{len} at {offset}");
        }
        let error = files.read_exact_at(FileId(1), bytes - 5, &mut [0; 20]).unwrap_err();
        let IoError::EndOfFile { range } = error else { panic!("{error:?}") };
        assert_eq!((range.offset, range.wanted, range.got), (bytes - 5, 20, 5));
        for (file, offset) in [(FileId(1), u64::MAX), (FileId(1), i64::MAX as u64), (FileId(2), 0)] {
            let error = files.read_exact_at(file, offset, &mut [0; 4]).unwrap_err();
            assert!(matches!(error, IoError::BadRequest { .. }), "{error:?}");
        }
    }
}

#[test]
fn what_is_read_into_place_is_whole_in_every_mode_and_leaves_no_pages_where_it_is_direct() {
    let bytes = (3 << 20) + 1234;
    let model = Model::new(&[10, bytes]);
    let mut arena = Arena::reserved(bytes as usize + 8192).unwrap();
    let cached = || measure::host::resident_share(&File::open(&model.paths[1]).unwrap());
    for mode in [IoMode::Drop, IoMode::Auto, IoMode::Mmap, IoMode::Buffered] {
        let files = model.open(mode);
        let whole =
            [(0, 3 << 20), (8, 1 << 20), (4096, 200_000), (4095, 131_072), (1_000_001, bytes as usize - 1_000_001)];
        let small = [(0, 0), (0, 1), (77, 8192), (bytes - 1, 1), (bytes - 131_072, 131_072)];
        for (offset, len) in whole.into_iter().chain(small) {
            // As it lies in the file, and one byte on.
            for shift in [0, 1] {
                let at = offset as usize % 4096 + shift;
                let buf = &mut arena.as_mut_slice()[at..at + len];
                populate(buf).unwrap();
                buf.fill(0x5a);
                measure::host::drop_pages(&File::open(&model.paths[1]).unwrap());
                files.read_placed(FileId(1), offset, buf).unwrap();
                let wrong = buf.iter().zip(offset..).position(|(byte, at)| *byte != byte_at(1, at));
                assert_eq!(wrong, None, "{mode}: {len} at {offset}, shifted by {shift}");
                let direct = matches!(files.access(FileId(1)), Access::Direct { .. });
                if direct && shift == 0 && offset == 0 && len == 3 << 20 {
                    assert_eq!(cached(), Some(0.0), "the page cache had a part in it");
                }
            }
            if mode == IoMode::Drop {
                assert!(cached().is_none_or(|share| share < 0.01), "pages are left behind {len} at {offset}");
            }
        }
        // A file that ends early, and places that no file has.
        let error = files.read_placed(FileId(1), bytes - 200_000, &mut arena.as_mut_slice()[..300_000]).unwrap_err();
        let IoError::EndOfFile { range } = error else { panic!("{error:?}") };
        assert!(range.path.ends_with("part-1.bin"));
        let at = (bytes - 200_000) as usize % 4096;
        let placed = &mut arena.as_mut_slice()[at..at + 300_000];
        assert!(matches!(files.read_placed(FileId(1), bytes - 200_000, placed), Err(IoError::EndOfFile { .. })));
        for (file, offset) in [(FileId(1), u64::MAX - 4095), (FileId(1), i64::MAX as u64), (FileId(2), 0)] {
            let error = files.read_placed(file, offset, &mut arena.as_mut_slice()[..200_000]).unwrap_err();
            assert!(matches!(error, IoError::BadRequest { .. }), "{error:?}");
        }
    }
}

#[test]
fn the_description_groups_files_by_how_they_are_read() {
    let model = Model::new(&[10, 10, 10]);
    let lines = model.open(IoMode::Buffered).describe();
    assert_eq!(lines, ["part-0.bin and 2 more files: buffered, as asked"]);
    let files = model.open(IoMode::Auto);
    assert_eq!(files.describe().len(), 1);
    if let Access::Direct { mem_align, offset_align } = files.access(FileId(0)) {
        assert!(files.align() >= 4096 && files.align().is_multiple_of(*offset_align.max(mem_align)));
        assert!(files.describe()[0].contains("direct"));
    }
}

#[test]
fn links_lead_to_the_file_and_read_only_directories_are_fine() {
    use std::os::unix::fs::PermissionsExt;
    let model = Model::new(&[5000]);
    let link = model.dir.path().join("link.bin");
    std::os::unix::fs::symlink(&model.paths[0], &link).unwrap();
    let read_only = |mode| std::fs::set_permissions(model.dir.path(), std::fs::Permissions::from_mode(mode)).unwrap();
    read_only(0o555);
    let files = millstream_io::FileSet::open(std::slice::from_ref(&link), IoMode::Auto).unwrap();
    let mut buf = [0; 5000];
    files.read_exact_at(FileId(0), 0, &mut buf).unwrap();
    assert!(buf.iter().zip(0..).all(|(byte, at)| *byte == byte_at(0, at)));
    files.check_unchanged().unwrap();
    read_only(0o755);
}
