# Compiler flags for the whole tree.
set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_C_FLAGS_RELWITHDEBINFO "-O2 -g")
set(CMAKE_C_FLAGS_DEBUG "-O1 -g")

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

add_compile_definitions(_GNU_SOURCE SITS_VERSION="${PROJECT_VERSION}")
add_compile_options(
  "$<$<COMPILE_LANGUAGE:C>:-Wall;-Wextra;-Werror;-Wstrict-prototypes;-Wmissing-prototypes;-Wshadow;-Wpointer-arith;-Wvla>"
  "$<$<COMPILE_LANGUAGE:C>:-Wno-unused-parameter;-Wno-missing-field-initializers>"
  "$<$<COMPILE_LANGUAGE:C>:-fno-math-errno;-ffp-contract=off;-fno-strict-aliasing>")
if(SITS_DEBUG_CHECKS)
  add_compile_definitions(SITS_DEBUG_CHECKS=1)
endif()
if(SITS_SANITIZE)
  add_compile_options("$<$<COMPILE_LANGUAGE:C>:-fsanitize=${SITS_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>")
  add_link_options(-fsanitize=${SITS_SANITIZE})
endif()
if(SITS_FUZZ)
  add_compile_options("$<$<COMPILE_LANGUAGE:C>:-fsanitize=fuzzer-no-link>")
endif()
include_directories(${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/src)
